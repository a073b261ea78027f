// SPDX-License-Identifier: Apache-2.0

// Command pipebench measures what a pipeline saves: two stages that do nothing,
// with 602,112 bytes between them, against the same two models called one after
// the other by the client, in turns in one run. The broker and each worker are
// processes of their own; the client moves the bytes between the two models in
// place, from one slot to the other.
//
//	go build -o bin/ ./cmd/pipebench && bin/pipebench
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// What it must reach: docs/pipelines.md.
const (
	aimThroughput = 1.3 // × the two models'
	aimLatency    = 0.7
)

const between = 602112 // bytes

// part is a model, or a stage: both are the same to a worker.
type part struct {
	Socket string
	Model  string
	Second bool
}

func (p *part) signature() tensor.Signature {
	x, h, y := spec("x", 64), spec("h", between), spec("y", 64)
	if p.Second {
		return tensor.Signature{Inputs: []tensor.Spec{h}, Outputs: []tensor.Spec{y}}
	}
	return tensor.Signature{Inputs: []tensor.Spec{x}, Outputs: []tensor.Spec{h}}
}

func spec(name string, bytes int) tensor.Spec {
	return tensor.Spec{Name: name, DType: tensor.U8, Shape: []int{bytes}}
}

func playBroker(c *testbed.Child, socket string) error {
	one, two := (&part{}).signature(), (&part{Second: true}).signature()
	p := policy.New(policy.Slots(64), policy.MaxBatchSize(8), policy.WaitTime(0))
	b, err := broker.New(broker.Config{Socket: socket, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Models: []broker.ModelConfig{
		{Name: "one", Signature: one, Policy: p},
		{Name: "two", Signature: two, Policy: p},
		{Name: "both", Signature: tensor.Signature{Inputs: one.Inputs, Outputs: two.Outputs}, Policy: p, Stages: []broker.StageConfig{
			{Name: "one", Signature: one}, {Name: "two", Signature: two},
		}},
	}})
	if err != nil {
		return err
	}
	if err := c.Ready(); err != nil {
		return err
	}
	return b.Serve(c.Context())
}

func playWorker(c *testbed.Child, p part) error {
	cfg := worker.Config{Socket: p.Socket, Model: p.Model, Signature: p.signature()}
	return worker.KeepAttached(c.Context(), cfg, func(ctx context.Context, w *worker.Worker) error {
		if err := c.Ready(); err != nil {
			return err
		}
		return w.ServeBatches(ctx, 1, func(_ context.Context, b *worker.Batch) error { b.Output(0); return nil })
	})
}

// way is how a request gets from x to y.
type way interface {
	ask(ctx context.Context) error
}

type pipeline struct{ both *client.Client }

func (w pipeline) ask(ctx context.Context) error {
	return run(ctx, w.both, nil, nil)
}

type oneByOne struct{ one, two *client.Client }

func (w oneByOne) ask(ctx context.Context) error {
	return run(ctx, w.one, nil, func(h []byte) error { return run(ctx, w.two, h, nil) })
}

// run is one request, in place: input is copied into its slot, and use reads the
// output there.
func run(ctx context.Context, c *client.Client, input []byte, use func(output []byte) error) error {
	req, err := c.Claim(ctx, 1)
	if err != nil {
		return err
	}
	defer req.Release()
	in, err := req.InputBytes(0)
	if err != nil {
		return err
	}
	if input != nil {
		copy(in, input)
	} else {
		in[0]++
	}
	if err := req.Commit(ctx); err != nil {
		return err
	}
	if err := req.Wait(ctx); err != nil {
		return err
	}
	out, err := req.OutputBytes(0)
	if err == nil && use != nil {
		err = use(out)
	}
	return err
}

type turn struct {
	perSecond float64
	p50       time.Duration
}

// measure runs so many requests at once for a while.
func measure(ctx context.Context, w way, atOnce int, lasts time.Duration) (turn, error) {
	times := make([][]time.Duration, atOnce)
	errs := make([]error, atOnce)
	start := time.Now()
	var wg sync.WaitGroup
	for i := range atOnce {
		wg.Go(func() {
			for at := time.Now(); time.Since(start) < lasts && errs[i] == nil; {
				errs[i] = w.ask(ctx)
				now := time.Now()
				times[i] = append(times[i], now.Sub(at))
				at = now
			}
		})
	}
	wg.Wait()
	took := time.Since(start)
	for _, err := range errs {
		if err != nil {
			return turn{}, err
		}
	}
	all := slices.Concat(times...)
	slices.Sort(all)
	return turn{float64(len(all)) / took.Seconds(), all[len(all)/2]}, nil
}

func median[T any](list []T, by func(T) float64) float64 {
	values := make([]float64, len(list))
	for i, v := range list {
		values[i] = by(v)
	}
	slices.Sort(values)
	return values[len(values)/2]
}

func main() {
	testbed.Play(testbed.Roles{"broker": testbed.With(playBroker), "worker": testbed.With(playWorker)})
	seconds := pflag.Float64("seconds", 1, "length of one turn")
	rounds := pflag.Int("rounds", 5, "turns of each")
	atOnce := pflag.Int("at_once", 8, "requests at once, for the throughput")
	pflag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := compare(ctx, time.Duration(*seconds*float64(time.Second)), *rounds, *atOnce); err != nil {
		fmt.Fprintln(os.Stderr, "pipebench:", err)
		os.Exit(1)
	}
}

func compare(ctx context.Context, lasts time.Duration, rounds, atOnce int) error {
	bed, err := testbed.New(ctx)
	if err != nil {
		return err
	}
	defer bed.Close()
	socket := bed.Path("b.sock")
	start := func(s testbed.Spec) error {
		p, err := bed.Start(s)
		if err == nil {
			err = p.Expect("ready", nil, 30*time.Second)
		}
		return err
	}
	if err := start(testbed.Spec{Role: "broker", Job: socket}); err != nil {
		return err
	}
	for _, p := range []part{{Model: "one"}, {Model: "two", Second: true}, {Model: "both/one"}, {Model: "both/two", Second: true}} {
		p.Socket = socket
		if err := start(testbed.Spec{Role: "worker", Job: p}); err != nil {
			return err
		}
	}
	dial := func(model string) (c *client.Client) {
		if err == nil {
			c, err = client.Dial(ctx, model, client.WithSocket(socket), client.WithWindow(atOnce))
		}
		return c
	}
	ways := []way{pipeline{dial("both")}, oneByOne{dial("one"), dial("two")}}
	if err != nil {
		return err
	}
	fmt.Printf("%d bytes between two stages that do nothing, %d cores\n", between, runtime.NumCPU())
	for _, n := range []int{atOnce, 1} {
		var turns [2][]turn
		for range rounds {
			for i, w := range ways {
				t, err := measure(ctx, w, n, lasts)
				if err != nil {
					return err
				}
				turns[i] = append(turns[i], t)
			}
		}
		rate, p50 := func(t turn) float64 { return t.perSecond }, func(t turn) float64 { return float64(t.p50.Microseconds()) }
		fmt.Printf("%2d at once: pipeline %8.0f requests/s, p50 %6.0f µs; one after the other %8.0f, %6.0f µs\n",
			n, median(turns[0], rate), median(turns[0], p50), median(turns[1], rate), median(turns[1], p50))
		fmt.Printf("            throughput × %.2f (aim ≥ %.1f), latency × %.2f (aim ≤ %.1f)\n",
			median(turns[0], rate)/median(turns[1], rate), aimThroughput, median(turns[0], p50)/median(turns[1], p50), aimLatency)
	}
	return nil
}
