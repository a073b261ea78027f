// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

var lanesModel = func() testbed.Model {
	m := theModel
	m.MaxBatch, m.Lanes = 1, 16
	return m
}()

// killLanes kills workers whose rows go round, and clients. A row of a dead worker begins again, so every answer
// must be whole. No lane may be lost.
func killLanes(r *run) {
	job := r.brokerJob()
	job.Models[0] = lanesModel
	h := r.startHost(job, 0, testbed.Spec{})
	h.addWorker(lanesModel)
	for range 2 {
		h.load(loadJob{Load: 16, Pause: 1000})
	}
	const requeue = "requeue of a dead worker's rows"
	var workers, clients, next atomic.Int64
	r.parallel(r.events, width, func() {
		if next.Add(1)%3 > 0 {
			if h.workerDies(requeue, victimJob{Model: lanesModel, Label: workerLabels[r.intn(len(workerLabels))], After: r.intn(40)}) {
				workers.Add(1)
			}
		} else if _, _, ok := r.dies("client", victimJob{Model: lanesModel, Label: clientLabels[r.intn(len(clientLabels))], After: r.intn(8)}); ok {
			r.pass()
			clients.Add(1)
		}
	})
	h.endLoads("WorkerDied")
	fmt.Printf("   %d workers and %d clients killed\n", workers.Load(), clients.Load())
	h.settled()
	all, err := h.stats()
	r.must(err)
	for _, w := range all[0].Workers {
		r.check(w.LanesInUse() == 0, "%d lanes of a worker are lost", w.LanesInUse())
	}
	r.inTime(requeue, reclaimBound)
}

// lane has a row that goes round.
type lane struct {
	b     *worker.Batch
	label string
	done  int // numbers of its answer
}

// goRounds holds as many rows as the model has lanes. In each round a row gets some numbers of its answer. It returns
// false when the broker is gone or ctx ends.
func (p *player) goRounds(ctx context.Context, w *worker.Worker) bool {
	var busy []*lane
	there, cancel := context.WithCancel(context.Background())
	cancel() // Next takes only a row that is there
	for {
		for len(busy) < p.Model.Lanes {
			wait := there
			if len(busy) == 0 {
				wait = ctx
			}
			b, err := w.Next(wait)
			if errors.Is(err, status.ErrBrokerGone) || len(busy) == 0 && err != nil {
				return false
			}
			if err != nil {
				break
			}
			busy = append(busy, &lane{b: b, label: p.labelOfNext()})
		}
		kept := busy[:0]
		for _, l := range busy {
			if p.goesOn(l) {
				kept = append(kept, l)
			}
		}
		busy = kept
		time.Sleep(50 * time.Microsecond)
	}
}

// goesOn is one round of a row; false: its lane is free.
func (p *player) goesOn(l *lane) bool {
	x := worker.Row[int64](l.b.Input(0), 0)
	switch {
	case !l.b.Waiting(0):
		l.b.Complete()
		return false
	case l.label == "taken" || x[0] == cmdPoison || l.label == "half-written" && l.done > len(x)/2:
		p.die()
	case l.label == "hangs up":
		p.hangUpAndDie()
	case l.label == "random" && l.done == 0:
		p.dieWithin(500 * time.Microsecond)
	}
	y := worker.Row[int64](l.b.Output(0), 0)
	for n := 1 + x[1]%5; n > 0 && l.done < len(x); n-- {
		y[l.done] = testbed.Answer(x[l.done], l.done)
		l.done++
	}
	if l.done < len(x) {
		return true
	}
	p.answer(l.b, l.label)
	return false
}
