// SPDX-License-Identifier: Apache-2.0

// Service is an HTTP service in front of a model: each request becomes one row, and rows of
// all requests, even of other processes, share batches.
//
//	ringbatch broker &
//	ringbatch worker affine --scale 2 --offset 1 --wait 10s &
//	go run ./examples/go/service --listen 127.0.0.1:8080 &
//	curl --retry 60 --retry-connrefused -d '[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]' http://127.0.0.1:8080/
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os/signal"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:8080", "address")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *listen); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, listen string) error {
	// One client for the whole process: 64 rows may be in flight at once, and a restart of
	// the broker is a pause, not an error.
	model, err := client.Dial(ctx, "affine", client.WithWindow(64), client.WithRetry(10*time.Second), client.WaitForModel())
	if err != nil {
		return err
	}
	defer model.Close()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		return err
	}
	fmt.Println("listening on", l.Addr())
	server := &http.Server{Handler: handler(model), ReadHeaderTimeout: 5 * time.Second}
	answered := make(chan error)
	go func() {
		<-ctx.Done()
		answered <- server.Shutdown(context.Background())
	}()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-answered // Serve returns at once, and the model must outlive the last request
}

func handler(model *client.Client) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var x []float32
		if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&x); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), 10*time.Second) // counts in the broker's queue, too
		defer cancel()
		outs, err := model.Infer(ctx, x)
		if err != nil {
			http.Error(w, err.Error(), code(err))
			return
		}
		y, err := tensor.As[float32](outs[0])
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		json.NewEncoder(w).Encode(y)
	}
}

// code is the HTTP status of an error: too late, worth another try, a bad request, or a failure.
func code(err error) int {
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, status.ErrExpired):
		return http.StatusGatewayTimeout
	case status.Retryable(err):
		return http.StatusServiceUnavailable
	case errors.Is(err, status.ErrShape), errors.Is(err, status.ErrRows), errors.Is(err, status.ErrSize), errors.Is(err, status.ErrTooLarge):
		return http.StatusBadRequest
	default: // status.ErrFailed, status.ErrWorkerDied
		return http.StatusInternalServerError
	}
}
