// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/cputime"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

// producerJob attaches one process to a model.
type producerJob struct {
	Socket string
	Model  string
	Window int // slots
	Seed   uint64
}

// order is one measurement. Times are on shm.Now's clock, which all processes share, so
// producers start and stop together.
type order struct {
	Do    string // "latency", "stream", "copy", "paced"
	Count int    // latency: requests
	Start int64
	Until int64
	Rate  float64 // paced: requests per second of this process
	Rows  int     // stream: rows of a request; 0 is 1
}

// outcome is the result of an order.
type outcome struct {
	Requests int
	Nanos    int64 // latency: median
	P99      int64 // latency, paced
	Bytes    int64 // of input, written
	CPU      int64 // nanoseconds of CPU time of this process, from the start on
}

func producerRole(c *testbed.Child, job producerJob) error {
	ctx := context.Background()
	s, err := client.Dial(ctx, job.Model, client.WithSocket(job.Socket), client.WithWindow(job.Window), client.WaitForModel())
	if err != nil {
		return err
	}
	t := transport{job, s}
	if err := rig.Ask(ctx, s, t.input()); err != nil {
		return err
	}
	return testbed.Serve(c, func(o order) (outcome, error) {
		debug.FreeOSMemory() // no collection during the measurement
		r, err := t.run(ctx, o)
		if err != nil {
			err = fmt.Errorf("%s: %w", o.Do, err)
		}
		return r, err
	})
}

type transport struct {
	job     producerJob
	session *client.Client
}

func (t *transport) run(ctx context.Context, o order) (outcome, error) {
	do := map[string]func(context.Context, order, []byte) (outcome, error){
		"latency": t.latency, "stream": t.stream, "copy": t.copyOnly, "paced": t.paced,
	}[o.Do]
	if do == nil {
		return outcome{}, fmt.Errorf("no such measurement")
	}
	input := t.input()
	load.SleepUntil(o.Start)
	before, err := cputime.Of(os.Getpid())
	if err != nil {
		return outcome{}, err
	}
	res, err := do(ctx, o, input)
	if err != nil {
		return res, err
	}
	after, err := cputime.Of(os.Getpid())
	res.CPU = int64(after - before)
	return res, err
}

// input of every request.
func (t *transport) input() []byte {
	return rig.Pattern(t.session.Model().Signature.Inputs[0].RowBytes())
}

// latency: one request at a time.
func (t *transport) latency(ctx context.Context, o order, input []byte) (outcome, error) {
	ns := make([]int64, o.Count)
	for i := range ns {
		start := shm.Now()
		if err := rig.Ask(ctx, t.session, input); err != nil {
			return outcome{}, err
		}
		ns[i] = shm.Now() - start
	}
	slices.Sort(ns)
	return outcome{Requests: len(ns), Nanos: ns[len(ns)/2], P99: ns[len(ns)*99/100]}, nil
}

// stream: as many requests as the window holds. When the oldest has ended, it takes all
// ended requests and commits as many new ones together. It counts rows.
func (t *transport) stream(ctx context.Context, o order, input []byte) (outcome, error) {
	c, rows := t.session, max(1, o.Rows)
	ring := make([]client.Request, t.job.Window/rows)
	fresh := make([]client.Request, 0, len(ring))
	var res outcome
	sent, done := 0, 0
	for now := shm.Now(); ; now = shm.Now() {
		if now < o.Until && sent-done < len(ring) {
			fresh = fresh[:0]
			for ; sent-done < len(ring); sent++ {
				r, err := rig.Submit(ctx, c, rows, input, false)
				if err != nil {
					return res, err
				}
				fresh = append(fresh, r)
				ring[sent%len(ring)] = r
			}
			if err := client.CommitAll(ctx, fresh); err != nil {
				return res, err
			}
		}
		if sent == done {
			return res, nil
		}
		for first := true; done < sent && (first || ring[done%len(ring)].Poll() != status.ErrNotDone); first = false {
			if err := rig.Finish(ctx, ring[done%len(ring)]); err != nil {
				return res, err
			}
			done++
			if now < o.Until {
				res.Requests += rows
				res.Bytes += int64(rows * len(input))
			}
		}
	}
}

// copyOnly: the producers' writes into the same slots, and nothing else.
func (t *transport) copyOnly(ctx context.Context, o order, input []byte) (outcome, error) {
	slots := make([][]byte, t.job.Window)
	for i := range slots {
		r, err := t.session.Claim(ctx, 1)
		if err != nil {
			return outcome{}, err
		}
		defer r.Release()
		if slots[i], err = r.InputBytes(0); err != nil {
			return outcome{}, err
		}
	}
	var res outcome
	for i := 0; shm.Now() < o.Until; i++ {
		copy(slots[i%len(slots)], input)
		res.Requests++
		res.Bytes += int64(len(input))
	}
	return res, nil
}

// paced: an open loop at a rate.
func (t *transport) paced(ctx context.Context, o order, input []byte) (outcome, error) {
	rnd := rand.New(rand.NewPCG(t.job.Seed, 1))
	var ns []int64
	at := float64(o.Start)
	for {
		at += rnd.ExpFloat64() / o.Rate * 1e9
		if int64(at) >= o.Until {
			break
		}
		load.SleepUntil(int64(at))
		if err := rig.Ask(ctx, t.session, input); err != nil {
			return outcome{}, err
		}
		ns = append(ns, shm.Now()-int64(at))
	}
	if len(ns) == 0 {
		return outcome{}, nil
	}
	slices.Sort(ns)
	return outcome{Requests: len(ns), P99: ns[len(ns)*99/100]}, nil
}
