// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

var errClosed = errors.New("the worker was closed before it ran this request")

// Fail ends the i-th request with err when the batch completes, and leaves its
// neighbours alone. Where err is one of the ways a request can end (a status of
// the group status.Ends), the request ends so; else with ErrFailed. Its client
// reads err's text after ErrFailed and ErrWorkerDied.
func (b *Batch) Fail(i int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail(i, err)
}

// FailAll is Fail for every request of the batch that has not failed already.
func (b *Batch) FailAll(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.reqs {
		if b.reqs[i].status == status.OK {
			b.fail(i, err)
		}
	}
}

func (b *Batch) fail(i int, err error) {
	if b.reasons == nil {
		b.reasons = map[int]string{}
	}
	b.reqs[i].status, b.reasons[i] = endOf(err), err.Error()
}

// endOf is the status that a request ends with because of err.
func endOf(err error) status.Code {
	var code status.Code
	if errors.As(err, &code) && code.Group() == status.Ends {
		return code
	}
	return status.ErrFailed
}

// Complete answers the clients and gives the batch back, from any goroutine
// and in any order with other batches. The batch must not be used after it; a
// second Complete does nothing.
//
// If the worker never asked for one of the outputs (Output, OutputNamed), its slots
// hold what an earlier request left there. Then Complete fails the requests and
// returns why. A worker that has asked for Worker.Planes may write anywhere, and
// is not checked; neither are outputs in device memory.
//
// In docs/model: Complete, then the push of Done.
func (b *Batch) Complete() (err error) {
	if b.end() {
		if err = b.unwritten(); err != nil {
			b.FailAll(err)
		}
		b.answer()
	}
	return err
}

// ask notes that the worker has asked for output k.
func (b *Batch) ask(k int) {
	if bit := uint64(1) << k; b.asked.Load()&bit == 0 {
		b.asked.Or(bit)
	}
}

// unwritten is the error of a batch that has requests to answer, and an output that its worker cannot have written.
func (b *Batch) unwritten() error {
	asked := b.asked.Load()
	b.mu.Lock()
	answered := slices.ContainsFunc(b.reqs, func(q request) bool { return q.status == status.OK })
	b.mu.Unlock()
	if b.w.direct.Load() || !answered {
		return nil
	}
	for k, p := range b.w.session.Layout.Outputs {
		if asked>>k&1 == 0 && !p.Spec.OnDevice() {
			return fmt.Errorf("the worker did not write output %q: it never asked for it (Batch.Output); write it, or fail the request", p.Spec.Name)
		}
	}
	return nil
}

// end tells the one caller that may answer.
func (b *Batch) end() bool { return b.ended.CompareAndSwap(false, true) }

// answer ends the batch:
//
//  1. for each request: its rows' sizes and its record, then its word (SYNC
//     POINT "completion"). Where another stage follows, only for those that
//     failed: the broker hands the others on.
//  2. one ring per client: rows are sorted by slot and windows don't
//     interleave, so a client's requests are neighbours
//  3. the broker learns that this worker has room again
func (b *Batch) answer() {
	done := shm.Done{Batch: b.id, Started: b.started, Finished: shm.Now()}
	board, handsOn := b.w.session.Board, b.w.session.Info.HandsOn
	b.mu.Lock()
	ended := false // something of this client
	for i := range b.reqs {
		q := &b.reqs[i]
		if q.status != status.OK {
			done.Failed++
		}
		// Somebody else may have ended it meanwhile (expired, canceled); then
		// record and reason are no longer ours to write.
		mine := q.status != status.OK || !handsOn
		ended = ended || mine
		if mine && isOpen(board, q.slot, q.gen) {
			rec := board.Record(q.slot)
			rec.Dispatched, rec.Started, rec.Finished, rec.ReasonLen = b.mailed, b.started, done.Finished, 0
			if b.outDims != nil {
				for k := range q.rows {
					board.Record(q.slot + k).Dims = b.outDims[q.row+k]
				}
			}
			if q.status != status.OK {
				board.SetReason(q.slot, b.reasons[i])
			}
			board.End(q.slot, q.gen, q.status, false)
		}
		if i+1 == len(b.reqs) || b.reqs[i+1].bell != q.bell {
			if ended {
				board.Ring(q.bell)
			}
			ended = false
		}
	}
	b.mu.Unlock()
	b.w.finished(b, &done)
}

// finished tells the broker that a batch is done.
func (w *Worker) finished(b *Batch, done *shm.Done) {
	// The clients may come back from now on; with several batches in flight
	// the worker may have waited for mails since long before.
	w.spinFor.Store(spinFor(done.Finished - done.Started))
	w.answered.Store(done.Finished)
	w.mu.Lock()
	defer w.mu.Unlock()
	ring, full := w.done.Push(done) // a ring of one producer: the holder of mu
	if full {
		panic("ringbatch: done ring is full") // cannot happen: it has room for twice the depth
	}
	if ring {
		w.session.Doorbell.Ring()
	}
	w.taken = slices.DeleteFunc(w.taken, func(t *Batch) bool { return t == b })
	if !b.kept {
		w.free = append(w.free, b)
	}
	if len(w.taken) == 0 {
		w.idle.Broadcast()
	}
}

// recycle takes back a batch that Serve kept.
func (w *Worker) recycle(b *Batch) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.free = append(w.free, b)
}

// spinFor is how long a worker spins for the next batch after one that took so
// long: a quarter of that, within bounds. All in nanoseconds.
func spinFor(took int64) int64 {
	return min(max(took/4, int64(shm.LeastSpin)), int64(mostSpin))
}

const mostSpin = time.Millisecond
