package admin_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/tensor"
)

// serveDouble runs a broker with one model, as another process of the host
// would. It returns the broker's socket.
func serveDouble() (socket string, stop func()) {
	dir, err := os.MkdirTemp("", "ringbatch")
	if err != nil {
		log.Fatal(err)
	}
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	if err != nil {
		log.Fatal(err)
	}
	b, err := broker.New(broker.Config{
		Socket: filepath.Join(dir, "broker.sock"), Logger: slog.New(slog.DiscardHandler),
		Models: []broker.ModelConfig{{Name: "double", Signature: sig}},
	})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- b.Serve(ctx) }()
	return b.Socket(), func() {
		cancel()
		<-served
		_ = os.RemoveAll(dir)
	}
}

func Example() {
	socket, stop := serveDouble()
	defer stop()
	ctx := context.Background()

	a := admin.New(socket)
	if err := a.Set(ctx, "double", map[string]string{"wait_time": "3ms"}); err != nil {
		log.Fatal(err)
	}
	models, err := a.Models(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range models {
		fmt.Println(m.Name, m.Signature.String(), "wait_time", m.Policy["wait_time"], "workers", m.Workers)
	}
	// Output: double x:f32[4] -> y:f32[4] wait_time 3ms workers 0
}

// Follow the broker's models without asking again and again.
func ExampleClient_Changed() {
	socket, stop := serveDouble()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	a := admin.New(socket)
	var known uint64 // 0: the first call returns at once
	for {
		now, err := a.Changed(ctx, known)
		if err != nil {
			break // ctx has ended, or the broker has gone: try again later
		}
		known = now
		models, err := a.Models(ctx)
		if err != nil {
			break
		}
		fmt.Println(len(models), "model")
		cancel() // enough for an example
	}
	// Output: 1 model
}
