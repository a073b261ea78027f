// SPDX-License-Identifier: Apache-2.0

// Lanes is a worker whose rows need different numbers of rounds. A row is a number, and its answer is the path of
// n → n/2 or 3n+1 down to 1. Each round adds a number to every path. A path that is done is answered alone, and clients
// that take parts see each number at once.
//
//	ringbatch broker &
//	go run ./examples/go/lanes &
//	go run ./examples/go/lanes 27    # a client
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"os"
	"os/signal"
	"slices"
	"strconv"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

const lanes = 16

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	run := func() error { return serve(ctx) }
	if len(os.Args) > 1 {
		run = func() error { return ask(ctx, os.Args[1]) }
	}
	if err := run(); err != nil && ctx.Err() == nil {
		log.Fatal(err)
	}
}

// path is a row in its lane.
type path struct {
	batch   *worker.Batch
	numbers []int64 // in the slot: nothing is copied
	size    int
	rounds  uint32
}

func serve(ctx context.Context) error {
	sig, err := tensor.ParseSignature([]string{"n:i64[]"}, []string{"path:i64[<=512]"})
	if err != nil {
		return err
	}
	// One row more than lanes waits in the mailbox, so that a lane is free for no round: the default Depth.
	w, err := worker.Attach(ctx, worker.Config{Model: "collatz", Signature: sig, Concurrency: lanes, Policy: policy.New(policy.MaxBatchSize(1))})
	if err != nil {
		return err
	}
	defer w.Close()
	over, cancel := context.WithCancel(ctx)
	cancel() // Next takes only a row that is there
	var busy []*path
	for {
		for len(busy) < lanes {
			wait := over
			if len(busy) == 0 {
				wait = ctx
			}
			b, err := w.Next(wait)
			if errors.Is(err, context.Canceled) && ctx.Err() == nil {
				break
			}
			if err != nil {
				return err
			}
			p := &path{batch: b, numbers: worker.Row[int64](b.Output(0), 0), size: 1}
			p.numbers[0] = worker.Row[int64](b.Input(0), 0)[0]
			busy = append(busy, p)
		}
		busy = slices.DeleteFunc(busy, (*path).step)
	}
}

// step is one round; true: the row is done, and its lane is free.
func (p *path) step() bool {
	n := p.numbers[p.size-1]
	p.rounds++
	switch {
	case !p.batch.Waiting(0): // canceled or late: nobody reads the answer
		n = 1
	case n < 1 || n > math.MaxInt64/4 || p.size == len(p.numbers):
		p.batch.Fail(0, errors.New("want a number from 1 on whose path has at most 512 numbers"))
		n = 1
	default:
		if n > 1 {
			n = []int64{n / 2, 3*n + 1}[n%2]
			p.numbers[p.size] = n
			p.size++
		}
		if err := p.batch.Show(0, p.size); err != nil { // also the size of the answer
			log.Print(err)
		}
	}
	if n > 1 {
		return false
	}
	p.batch.SetRounds(p.rounds) // for ringbatch stats
	p.batch.Complete()
	return true
}

func ask(ctx context.Context, text string) error {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return err
	}
	c, err := client.Dial(ctx, "collatz", client.WaitForModel())
	if err != nil {
		return err
	}
	defer c.Close()
	for part, err := range c.Stream(ctx, []int64{n}) {
		if err != nil {
			return err
		}
		if part.Restarted {
			fmt.Println("from the start:")
		}
		numbers, err := tensor.As[int64](part.Tensor)
		if err != nil {
			return err
		}
		for _, n := range numbers {
			fmt.Println(n)
		}
	}
	return nil
}
