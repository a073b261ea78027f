// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

var stateModel = func() testbed.Model {
	m := theModel
	m.State = true
	return m
}()

var stepLabels = []string{testbed.StepClaim, testbed.StepWrite, testbed.StepCommit, testbed.StepRead, testbed.StepRelease}

// killSequences kills workers and clients of a model whose state is a hash of the state
// before and the input. No sequence may have a lost, doubled or foreign step. Of three
// events one is a worker's SIGKILL, one a client's, and one a client that stops at a step
// while its connection ends, which the broker takes for its death.
func killSequences(r *run) {
	job := r.brokerJob()
	job.Models[0] = stateModel
	h := r.startHost(job, 0, testbed.Spec{})
	h.addWorker(stateModel)
	for range 2 {
		job := loadJob{Socket: h.socket(), Model: stateModel.Name, Seed: r.seed(), Load: 6, Pause: 1000}
		h.addLoad(r.start(testbed.Spec{Role: "sequences", Job: job, Procs: 2}))
	}
	const width = 2 * width // most events wait for a new process
	droppers := make(chan *testbed.Process, width)
	for range width {
		p := r.start(testbed.Spec{Role: "dropper", Job: h.socket(), Procs: 2})
		r.must(p.Expect("ready", nil, enoughTime))
		droppers <- p
	}
	const requeue = "requeue of a dead worker's steps"
	var workers, clients, dropped, next atomic.Int64
	r.parallel(r.events, width, func() {
		switch next.Add(1) % 3 {
		case 0:
			if h.workerDies(requeue, victimJob{Model: stateModel, Label: workerLabels[r.intn(len(workerLabels))], After: r.intn(8)}) {
				workers.Add(1)
			}
		case 1:
			label := clientLabels[r.intn(len(clientLabels))]
			if _, _, ok := r.dies("sequence", victimJob{Model: stateModel, Label: label, After: r.intn(8)}); ok {
				r.pass()
				clients.Add(1)
			}
		case 2:
			p := <-droppers
			defer func() { droppers <- p }()
			err := p.Send(dropJob{stepLabels[r.intn(len(stepLabels))], r.intn(8), r.seed()})
			if err == nil {
				err = p.Expect("answer", nil, enoughTime)
			}
			if r.check(err == nil, "a client whose connection ends: %v", err); err == nil {
				dropped.Add(1)
			}
		}
	})
	sum := h.endLoads("WorkerDied", "Expired", "Canceled", "Timeout", "Overloaded", "Full", "QueueTimeout")
	fmt.Printf("   %d workers and %d clients killed, %d clients cut off; %d sequences of honest clients took %d steps\n",
		workers.Load(), clients.Load(), dropped.Load(), sum.Sequences, sum.Steps)
	for range width {
		r.bed.End(<-droppers)
	}
	h.settled()
	r.inTime(requeue, reclaimBound)
}

// dialState dials the model with room for some sequences and their copies.
func dialState(ctx context.Context, socket string, sequences int) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, enoughTime)
	defer cancel()
	return client.Dial(ctx, stateModel.Name, client.WithSocket(socket), client.WithWindow(6*sequences), client.WaitForModel())
}

// turns lets a sequence live for n turns, unless ctx ends. A turn may end with any named
// error; the sequence checks that its state is then as before.
func turns(ctx context.Context, c *client.Client, rng *rand.Rand, n int, at func(turn int, step string),
	end func(error, time.Duration)) (steps int, err error) {
	q, err := testbed.NewSequence(ctx, c, 1+rng.IntN(3), rng.Uint64())
	if err != nil {
		return 0, err
	}
	defer q.Close()
	for turn := 0; turn < n && ctx.Err() == nil; turn++ {
		start := time.Now()
		own, cancel := context.WithTimeout(context.Background(), patience)
		err := q.Turn(own, func(step string) { at(turn, step) })
		cancel()
		end(err, time.Since(start))
	}
	own, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return q.Steps, q.Check(own)
}

// playSequences runs sequences in several goroutines until SIGTERM. Its last message is
// the tally.
func playSequences(child *testbed.Child, job loadJob) error {
	ctx := child.Context()
	c, err := dialState(ctx, job.Socket, job.Load)
	if err != nil {
		return err
	}
	_ = child.Ready()
	var mu sync.Mutex
	t := tally{Named: map[string]int{}}
	stalls := testbed.WatchStalls(nil, false)
	end := func(err error, took time.Duration) {
		mu.Lock()
		t.count(err, took, patience+stalls.Since(time.Now().Add(-took)), status.OK)
		mu.Unlock()
		time.Sleep(time.Duration(rand.IntN(2*job.Pause)) * time.Microsecond)
	}
	var wg sync.WaitGroup
	for k := range job.Load {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(job.Seed, uint64(k)))
			for ctx.Err() == nil {
				steps, err := turns(ctx, c, rng, rng.IntN(300), func(int, string) {}, end)
				if ctx.Err() == nil {
					end(err, 0)
				}
				mu.Lock()
				t.Steps += steps
				t.Sequences++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	t.Stood = stalls.Since(time.Time{})
	return errors.Join(child.Tell("tally", &t), c.Close())
}

// named passes on a wrong answer, and an error without a name.
func named(err error) error {
	var s status.Code
	if errors.Is(err, testbed.ErrWrongBytes) || err != nil && !errors.As(err, &s) {
		return err
	}
	return nil
}

// playSequence takes some turns, then dies at its label.
func playSequence(child *testbed.Child, job victimJob) error {
	p := newPlayer(child, job)
	if p.Label == "dial" {
		p.dieWithin(400 * time.Microsecond)
	}
	c, err := dialState(child.Context(), p.Socket, 1)
	if err != nil {
		return err
	}
	for {
		if p.Label == "random" {
			p.dieWithin(5 * time.Millisecond)
		}
		var wrong error
		_, err := turns(child.Context(), c, p.rng, 100, func(turn int, step string) {
			switch {
			case turn < p.After:
			case step == p.Label:
				p.die()
			case step == testbed.StepCommit && p.Label == "wait":
				p.dieWithin(300 * time.Microsecond)
			}
		}, func(err error, _ time.Duration) { wrong = errors.Join(wrong, named(err)) })
		if err := errors.Join(wrong, named(err)); err != nil {
			return err
		}
	}
}

// dropJob is a client that stops at a step, after some turns.
type dropJob struct {
	Label string
	After int
	Seed  uint64
}

// playDropper plays clients, one after the other, whose connection ends while they stop
// at a step. To the broker they are dead, and the library sees the death of its broker.
func playDropper(child *testbed.Child, socket string) error {
	return testbed.Serve(child, func(job dropJob) (none struct{}, err error) {
		c, err := dialState(child.Context(), socket, 1)
		if err != nil {
			return none, err
		}
		defer c.Close()
		rng := rand.New(rand.NewPCG(job.Seed, 4))
		var wrong error
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				_, err := turns(child.Context(), c, rng, 100, func(turn int, step string) {
					if turn >= job.After && step == job.Label {
						hangUpSockets()
						time.Sleep(5 * time.Millisecond) // the broker must find the step as it is
						runtime.Goexit()
					}
				}, func(err error, _ time.Duration) { wrong = errors.Join(wrong, named(err)) })
				wrong = errors.Join(wrong, named(err))
			}
		}()
		<-ended
		return none, wrong
	})
}
