// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// transportJob attaches one process to a model, with one or more sessions.
type transportJob struct {
	Socket   string
	Model    string
	Window   int // slots per session
	Sessions int
	Seed     uint64
}

// transportOrder is one measurement. Times are on shm.Now's clock, which all
// processes share, so that all producers start and stop together.
type transportOrder struct {
	Do    string // "latency", "stream", "copy", "paced", "pace only", "in flight"
	Count int    // latency, in flight: requests
	Start int64
	Until int64
	Rate  float64 // paced: requests per second of this process
	Rows  int     // stream: rows of a request; 0 is 1
}

// transportResult is what it gave.
type transportResult struct {
	Requests int
	Nanos    int64 // latency: median; in flight: the whole time
	P99      int64 // latency, paced
	Median   int64 // paced
	Bytes    int64 // of input, written
	CPU      int64 // nanoseconds of CPU time of this process, from the start on
}

func transportRole(c *testbed.Child, job transportJob) error {
	ctx := context.Background()
	t := transport{job: job}
	for range job.Sessions {
		s, err := client.Dial(ctx, job.Model, client.WithSocket(job.Socket), client.WithWindow(job.Window), client.WaitForModel())
		if err != nil {
			return err
		}
		t.sessions = append(t.sessions, s)
		if err := t.one(ctx, s, pattern(s)); err != nil {
			return err
		}
	}
	return testbed.Serve(c, func(o transportOrder) (transportResult, error) {
		debug.FreeOSMemory() // start clean, so that no collection falls into the measurement
		r, err := t.run(ctx, o)
		if err != nil {
			err = fmt.Errorf("%s: %w", o.Do, err)
		}
		return r, err
	})
}

type transport struct {
	job      transportJob
	sessions []*client.Client
}

func (t *transport) run(ctx context.Context, o transportOrder) (transportResult, error) {
	do := map[string]func(context.Context, transportOrder, []byte) (transportResult, error){
		"latency": t.latency, "stream": t.stream, "copy": t.copyOnly, "paced": t.paced, "pace only": t.paced, "in flight": t.inFlight,
	}[o.Do]
	if do == nil {
		return transportResult{}, fmt.Errorf("no such measurement")
	}
	input := pattern(t.sessions[0])
	sleepUntil(o.Start)
	before, err := testbed.CPUTime(os.Getpid())
	if err != nil {
		return transportResult{}, err
	}
	res, err := do(ctx, o, input)
	if err != nil {
		return res, err
	}
	after, err := testbed.CPUTime(os.Getpid())
	res.CPU = int64(after - before)
	return res, err
}

// pattern is an input whose echo is easily checked.
func pattern(c *client.Client) []byte {
	input := make([]byte, c.Model().Signature.Inputs[0].RowBytes())
	for i := range input {
		input[i] = byte(i)
	}
	return input
}

// one request, from Claim to Release.
func (t *transport) one(ctx context.Context, c *client.Client, input []byte) error {
	r, err := submit(ctx, c, input)
	if err != nil {
		return err
	}
	return finish(ctx, r)
}

// submit claims, writes and commits.
func submit(ctx context.Context, c *client.Client, input []byte) (client.Request, error) {
	r, err := claim(ctx, c, 1, input)
	if err != nil {
		return r, err
	}
	return r, r.Commit(ctx)
}

// claim claims and writes the input into each row.
func claim(ctx context.Context, c *client.Client, rows int, input []byte) (client.Request, error) {
	r, err := c.Claim(ctx, rows)
	if err != nil {
		return r, err
	}
	dst, err := r.InputBytes(0)
	if err != nil {
		return r, err
	}
	for ; len(dst) > 0; dst = dst[len(input):] {
		copy(dst, input)
	}
	return r, nil
}

// finish waits for the answer, looks at its first row and gives the slots
// back.
func finish(ctx context.Context, r client.Request) error {
	if err := r.Wait(ctx); err != nil {
		return err
	}
	out, err := r.OutputBytes(0)
	if err != nil {
		return err
	}
	if n := len(out) / r.Rows(); out[n-1] != byte(n-1) {
		return fmt.Errorf("wrong answer: byte %d is %d", n-1, out[n-1])
	}
	return r.Release()
}

// latency: one request at a time.
func (t *transport) latency(ctx context.Context, o transportOrder, input []byte) (transportResult, error) {
	ns := make([]int64, o.Count)
	for i := range ns {
		start := shm.Now()
		if err := t.one(ctx, t.sessions[0], input); err != nil {
			return transportResult{}, err
		}
		ns[i] = shm.Now() - start
	}
	slices.Sort(ns)
	return transportResult{Requests: len(ns), Nanos: ns[len(ns)/2], P99: ns[len(ns)*99/100]}, nil
}

// stream: as many requests as the window holds. Whatever has ended when the
// oldest has is taken at once, and as many new ones are committed together.
// What it counts are rows.
func (t *transport) stream(ctx context.Context, o transportOrder, input []byte) (transportResult, error) {
	c, rows := t.sessions[0], max(1, o.Rows)
	ring := make([]client.Request, t.job.Window/rows)
	fresh := make([]client.Request, 0, len(ring))
	var res transportResult
	sent, done := 0, 0
	for now := shm.Now(); ; now = shm.Now() {
		if now < o.Until && sent-done < len(ring) {
			fresh = fresh[:0]
			for ; sent-done < len(ring); sent++ {
				r, err := claim(ctx, c, rows, input)
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
			if err := finish(ctx, ring[done%len(ring)]); err != nil {
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

// copyOnly: the producers' own writes into the same slots, and nothing else.
func (t *transport) copyOnly(ctx context.Context, o transportOrder, input []byte) (transportResult, error) {
	slots := make([][]byte, t.job.Window)
	for i := range slots {
		r, err := t.sessions[0].Claim(ctx, 1)
		if err != nil {
			return transportResult{}, err
		}
		defer r.Release()
		if slots[i], err = r.InputBytes(0); err != nil {
			return transportResult{}, err
		}
	}
	var res transportResult
	for i := 0; shm.Now() < o.Until; i++ {
		copy(slots[i%len(slots)], input)
		res.Requests++
		res.Bytes += int64(len(input))
	}
	return res, nil
}

// paced: an open loop at a rate, spread over the sessions by turns. "pace
// only" sends nothing: what the load generator itself costs.
func (t *transport) paced(ctx context.Context, o transportOrder, input []byte) (transportResult, error) {
	rnd := rand.New(rand.NewPCG(t.job.Seed, 1))
	var ns []int64
	at := float64(o.Start)
	for i := 0; ; i++ {
		at += rnd.ExpFloat64() / o.Rate * 1e9
		if int64(at) >= o.Until {
			break
		}
		sleepUntil(int64(at))
		if o.Do == "paced" {
			if err := t.one(ctx, t.sessions[i%len(t.sessions)], input); err != nil {
				return transportResult{}, err
			}
		}
		ns = append(ns, shm.Now()-int64(at))
	}
	if len(ns) == 0 {
		return transportResult{}, nil
	}
	slices.Sort(ns)
	return transportResult{Requests: len(ns), Median: ns[len(ns)/2], P99: ns[len(ns)*99/100]}, nil
}
