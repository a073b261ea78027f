// SPDX-License-Identifier: Apache-2.0

// Command goproducer is the Go side of bench/python: a producer that sends one
// model's worth of rows for a while and prints what it saw, as JSON.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/client"
)

func main() {
	model := flag.String("model", "echo", "the model")
	calls := flag.Int("calls", 0, "one at a time: so many round trips")
	seconds := flag.Float64("seconds", 0, "instead: as many as possible for so long")
	inFlight := flag.Int("in_flight", 1, "with --seconds: requests in flight")
	flag.Parse()
	if err := run(*model, *calls, *seconds, *inFlight); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(model string, calls int, seconds float64, inFlight int) error {
	ctx := context.Background()
	wait, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	c, err := client.Dial(wait, model, client.WithWindow(max(1, inFlight)), client.WaitForModel())
	if err != nil {
		return err
	}
	defer c.Close()
	if calls > 0 {
		return roundTrips(ctx, c, calls)
	}
	return throughput(ctx, c, seconds, inFlight)
}

// once is a request without the application's own part: claim, write, wait.
func once(ctx context.Context, c *client.Client, in []byte) error {
	r, err := c.Claim(ctx, 1)
	if err != nil {
		return err
	}
	defer r.Release()
	x, err := r.InputBytes(0)
	if err != nil {
		return err
	}
	copy(x, in)
	if err := r.Commit(ctx); err != nil {
		return err
	}
	if err := r.Wait(ctx); err != nil {
		return err
	}
	y, err := r.OutputBytes(0)
	if err != nil {
		return err
	}
	out := make([]byte, len(y)) // as a caller of Infer gets it
	copy(out, y)
	return nil
}

func roundTrips(ctx context.Context, c *client.Client, calls int) error {
	in := make([]byte, c.Model().Signature.Inputs[0].RowBytes())
	times := make([]float64, calls)
	for i := range times {
		start := time.Now()
		if err := once(ctx, c, in); err != nil {
			return err
		}
		times[i] = float64(time.Since(start)) / 1e3
	}
	slices.Sort(times)
	return json.NewEncoder(os.Stdout).Encode(map[string]float64{"p50_us": times[calls/2], "p99_us": times[calls*99/100]})
}

func throughput(ctx context.Context, c *client.Client, seconds float64, inFlight int) error {
	fmt.Println("ready")
	var line string
	_, _ = fmt.Scanln(&line) // all producers start together
	var done atomic.Int64
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	end := time.Now().Add(time.Duration(seconds * 1e9))
	for range inFlight {
		wg.Add(1)
		go func() {
			defer wg.Done()
			in := make([]byte, c.Model().Signature.Inputs[0].RowBytes())
			for time.Now().Before(end) {
				if err := once(ctx, c, in); err != nil {
					failed.Store(&err)
					return
				}
				done.Add(1)
			}
		}()
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return json.NewEncoder(os.Stdout).Encode(map[string]float64{"requests": float64(done.Load()), "seconds": seconds})
}
