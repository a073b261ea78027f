// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

var streamModel = func() testbed.Model {
	m := theModel
	m.Streams, m.Width = true, 64
	return m
}()

// step is one step of the answer to x. The first names the run of the worker that wrote
// it, so that no two runs have a step in common.
func step(run, x int64, j int) int64 {
	if j == 0 {
		return run
	}
	return testbed.Answer(run^x, j)
}

// killStreams kills workers and clients in the middle of streams. Every part must be the
// next steps of one run of a worker, and together they must be the answer.
func killStreams(r *run) {
	job := r.brokerJob()
	job.Models[0] = streamModel
	h := r.startHost(job, 0, testbed.Spec{})
	w := r.victim("writer", victimJob{Model: streamModel}) // lives
	h.workers = append(h.workers, w)
	r.must(w.Expect("attached", nil, enoughTime))
	var over atomic.Bool
	var killers sync.WaitGroup
	var kills [2]atomic.Int64
	for i, role := range []string{"writer", "writer", "reader"} {
		killers.Go(func() {
			r.guard(func() {
				for ok := true; ok && !over.Load() && r.ctx.Err() == nil; kills[i/2].Add(1) {
					_, _, ok = r.dies(role, victimJob{Model: streamModel, Label: "random", After: r.intn(20)})
				}
			})
		})
	}
	for range 2 {
		h.addLoad(r.start(testbed.Spec{Role: "readers", Job: loadJob{Socket: h.socket(), Seed: r.seed(), Load: 16}, Procs: 2}))
	}
	for answers := 0; answers < r.events && r.ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if s, err := h.stats(); err == nil { // a busy machine may answer late
			answers = int(s[0].Ended[status.OK.Name()])
			r.progress(answers)
		}
	}
	over.Store(true)
	killers.Wait()
	sum := h.endLoads("WorkerDied", "Restarted", "Canceled")
	r.check(sum.Restarts > 0, "no stream began again")
	fmt.Printf("   %d workers and %d clients killed; %d parts, %d streams began again\n", kills[0].Load(), kills[1].Load(), sum.Steps, sum.Restarts)
	h.settled()
}

// playWriter shows its answers in parts. It begins some again, and dies in the middle of one if it has a label.
func playWriter(c *testbed.Child, job victimJob) error {
	p, batches := newPlayer(c, job), 0
	cfg := job.Model.WorkerConfig(job.Socket)
	cfg.WaitForBroker, cfg.Attached = enoughTime, func() { _ = c.Tell("attached", nil) }
	return worker.Serve(c.Context(), cfg, func(_ context.Context, b *worker.Batch) error {
		run, dies := p.rng.Int64(), -1
		if batches++; job.Label != "" && batches > job.After {
			dies = p.rng.IntN(job.Model.Width)
		}
		for from := 0; from < job.Model.Width; {
			if p.rng.IntN(200) == 0 {
				run, from = p.rng.Int64(), 0
				for row := range b.Rows() {
					if err := b.Show(row, 0); err != nil {
						return err
					}
				}
			}
			to := from + 1 + p.rng.IntN(6)
			for row := range b.Rows() {
				x, y := worker.Row[int64](b.Input(0), row), worker.Row[int64](b.Output(0), row)
				n := min(to, int(x[1]))
				for j := from; j < n; j++ {
					y[j] = step(run, x[2], j)
					if j == dies {
						p.die()
					}
				}
				if err := b.Show(row, n); err != nil {
					return err
				}
			}
			if from = to; p.rng.IntN(8) == 0 {
				time.Sleep(50 * time.Microsecond)
			}
		}
		return nil
	})
}

// stream takes one stream, and checks every step. It may stop early.
func stream(ctx context.Context, c *client.Client, rng *rand.Rand, at func()) (parts, restarts int, err error) {
	x := make([]int64, streamModel.Width)
	x[1], x[2] = rng.Int64N(int64(len(x))+1), rng.Int64()
	stops := rng.IntN(50) == 0
	r, err := c.Fill(ctx, x)
	if err != nil {
		return 0, 0, err
	}
	defer r.Release()
	if err := errors.Join(r.SetParts(rng.IntN(4) > 0), r.Commit(ctx)); err != nil {
		return 0, 0, err
	}
	var got []int64
	for {
		part, err := r.NextPart(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return parts, restarts, err
		}
		if parts++; part.Restarted {
			got = got[:0]
			restarts++
		}
		steps, err := tensor.As[int64](part.Tensor)
		if err != nil {
			return parts, restarts, err
		}
		for _, y := range steps {
			if got = append(got, y); y != step(got[0], x[2], len(got)-1) {
				return parts, restarts, fmt.Errorf("%w: step %d of a stream is of another run", testbed.ErrWrongBytes, len(got)-1)
			}
		}
		at()
		switch rng.IntN(16) {
		case 0:
			time.Sleep(time.Duration(rng.IntN(1000)) * time.Microsecond) // a slow reader
		case 1:
			if stops {
				return parts, restarts, status.ErrCanceled
			}
		}
	}
	view, err := r.Output("y")
	if err != nil {
		return parts, restarts, err
	}
	if whole, err := tensor.As[int64](view); err != nil || len(got) != int(x[1]) || !slices.Equal(whole, got) {
		return parts, restarts, fmt.Errorf("%w: parts of %d steps, the answer has %d, asked for %d (%v)", testbed.ErrWrongBytes, len(got),
			len(whole), x[1], err)
	}
	return parts, restarts, nil
}

func dialStreams(ctx context.Context, socket string, window int) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, enoughTime)
	defer cancel()
	return client.Dial(ctx, streamModel.Name, client.WithSocket(socket), client.WithWindow(window), client.WaitForModel())
}

// playReader takes streams, and dies in the middle of one.
func playReader(child *testbed.Child, job victimJob) error {
	p := newPlayer(child, job)
	c, err := dialStreams(child.Context(), job.Socket, 4)
	if err != nil {
		return err
	}
	for parts := 0; ; {
		_, _, _ = stream(child.Context(), c, p.rng, func() {
			if parts++; parts > job.After {
				p.dieWithin(200 * time.Microsecond)
			}
		})
	}
}

// playReaders takes streams in several goroutines until SIGTERM. Its last message is the
// tally.
func playReaders(child *testbed.Child, job loadJob) error {
	ctx := child.Context()
	c, err := dialStreams(ctx, job.Socket, job.Load)
	if err != nil {
		return err
	}
	_ = child.Ready()
	var mu sync.Mutex
	t := tally{Named: map[string]int{}}
	stalls := testbed.WatchStalls(nil, false)
	var wg sync.WaitGroup
	for k := range job.Load {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(job.Seed, uint64(k)))
			for ctx.Err() == nil {
				start := time.Now()
				own, cancel := context.WithTimeout(context.Background(), patience)
				parts, restarts, err := stream(own, c, rng, func() {})
				cancel()
				mu.Lock()
				t.count(err, time.Since(start), patience+stalls.Since(start), status.OK)
				t.Steps, t.Restarts = t.Steps+parts, t.Restarts+restarts
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	t.Stood = stalls.Since(time.Time{})
	return errors.Join(child.Tell("tally", &t), c.Close())
}
