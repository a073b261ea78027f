// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

var errClosed = errors.New("the worker was closed before it ran this request")

// Fail ends the i-th request with err when the batch completes: with the status of group
// status.Ends that err matches, else with ErrFailed and err's text.
func (b *Batch) Fail(i int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail(i, err)
}

// FailAll fails all other requests as a whole: unless Config.RunOnce, or err matches a
// status of group status.Ends, the broker runs them again in smaller batches.
func (b *Batch) FailAll(err error) {
	b.failAll(err, b.w.session.Info.Isolates && endOf(err) == status.ErrFailed)
}

func (b *Batch) failAll(err error, whole bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.reqs {
		if b.reqs[i].status == status.OK {
			b.fail(i, err)
			b.reqs[i].whole = whole
		}
	}
}

func (b *Batch) fail(i int, err error) {
	if b.reasons == nil {
		b.reasons = map[int]string{}
	}
	b.reqs[i].status, b.reqs[i].whole, b.reasons[i] = endOf(err), false, err.Error()
}

// endOf is the status of a request that ends because of err.
func endOf(err error) status.Code {
	var code status.Code
	if errors.As(err, &code) && code.Group() == status.Ends {
		return code
	}
	return status.ErrFailed
}

// Complete answers the clients, in any order of batches and from any goroutine. A second
// Complete does nothing. A row of an output that the worker never asked for (Bytes, Row,
// Run, Contiguous) holds old bytes: Complete fails its request, and returns why, except
// for device memory.
func (b *Batch) Complete() (err error) {
	// In test/model: Complete, then the push of Done.
	if b.beginAnswer() {
		err = cmp.Or(b.failUnwritten(), b.failTexts())
		b.answer()
	}
	return err
}

// failUnwritten fails each request with a row of which the worker never got the memory of an
// output, or took back steps that it had shown. It returns the first reason.
func (b *Batch) failUnwritten() (first error) {
	missing := b.unasked()
	if missing == 0 && b.shown == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.reqs {
		q := &b.reqs[i]
		if q.status != status.OK || !isOpen(b.w.session.Board, q.slot, q.gen) {
			continue
		}
		if err := cmp.Or(b.unwritten(q, missing), b.tookBack(q)); err != nil {
			b.fail(i, err)
			first = cmp.Or(first, err)
		}
	}
	return first
}

// failTexts fails each request with a text in an output that is not UTF-8. It returns the first reason.
func (b *Batch) failTexts() (first error) {
	session := b.w.session
	for k := range session.Layout.Outputs {
		p := &session.Layout.Outputs[k]
		if p.Spec.DType != tensor.Str {
			continue
		}
		for i := range b.reqs {
			q := &b.reqs[i]
			if q.status != status.OK || !isOpen(session.Board, q.slot, q.gen) {
				continue
			}
			if _, err := p.Spec.CheckTexts(p.Rows(session.Planes.Bytes(), q.slot, int(q.rows))); err != nil {
				err = fmt.Errorf("the worker wrote output %w", err)
				b.Fail(i, err)
				first = cmp.Or(first, err)
			}
		}
	}
	return first
}

// unasked are the outputs and next states that the worker must write, and did not ask for as a whole.
func (b *Batch) unasked() (missing uint64) {
	if b.w.direct.Load() {
		return 0
	}
	layout := b.w.session.Layout
	for k := range layout.Outputs {
		if !layout.Outputs[k].Spec.OnDevice() {
			missing |= 1 << k
		}
	}
	for k := range layout.State {
		if s := &layout.State[k].Spec; !s.OnDevice() && s.RowElems() > 0 {
			missing |= 1 << (len(layout.Outputs) + k)
		}
	}
	return missing &^ b.asked.Load()
}

// unwritten returns an error if a row of a request lacks one of these.
func (b *Batch) unwritten(q *request, missing uint64) error {
	layout := b.w.session.Layout
	for row := q.row; row < q.row+q.rows; row++ {
		for left := missing &^ b.askedOf[row].Load(); left != 0; left &= left - 1 {
			k := bits.TrailingZeros64(left)
			what, planes := "output", layout.Outputs
			if k >= len(planes) {
				what, planes, k = "state", layout.State, k-len(planes)
			} else if b.isEmpty(row, k) {
				continue
			}
			return fmt.Errorf("the worker did not write %s %q of row %d in a batch of %d: write every row, or fail its request",
				what, planes[k].Spec.Name, row, len(b.slots))
		}
	}
	return nil
}

// isEmpty reports whether a row of an output has no elements.
func (b *Batch) isEmpty(row uint32, k int) bool {
	outputs := b.w.session.Layout.Outputs
	at, n := dimsAt(outputs, k), len(outputs[k].Spec.Variable)
	return n > 0 && slices.Contains(b.outDims[row][at:at+n], 0)
}

// beginAnswer returns true for the one caller that may answer the batch.
func (b *Batch) beginAnswer() bool { return b.ended.CompareAndSwap(false, true) }

// answer ends the batch:
//
//  1. For each request it writes its rows' sizes and its record, then its word (SYNC
//     POINT "completion"). If another stage follows, it does so only for failed
//     requests: the broker hands on the others. A request that failed with its batch
//     gets a record only: the broker runs it again or ends it.
//  2. It rings once per client. Rows are sorted by slot and windows do not interleave,
//     so the requests of a client are neighbours.
//  3. It pushes a Done entry: this worker has room again.
func (b *Batch) answer() {
	done := shm.Done{Batch: b.id, Started: b.started, Finished: shm.Now()}
	board, handsOn := b.w.session.Board, b.w.session.Info.HandsOn
	b.mu.Lock()
	ended := false // a request of this client
	for i := range b.reqs {
		q := &b.reqs[i]
		if q.status != status.OK {
			done.Failed++
		}
		// If the request was canceled or has expired meanwhile, this worker no longer
		// owns its record and reason.
		mine := q.status != status.OK || !handsOn
		ended = ended || mine && !q.whole
		if q.whole {
			done.Whole = 1
		}
		if mine && isOpen(board, q.slot, q.gen) {
			rec := board.Record(q.slot)
			rec.Dispatched, rec.Started, rec.Finished, rec.ReasonLen = b.mailed, b.started, done.Finished, 0
			rec.Version = b.version
			if b.outDims != nil {
				for k := range q.rows {
					board.Record(q.slot + k).Dims = b.outDims[q.row+k]
				}
			}
			if q.status != status.OK {
				board.SetReason(q.slot, b.reasons[i])
			}
			if !q.whole {
				board.End(q.slot, q.gen, q.status, false)
			}
		}
		if i+1 == len(b.reqs) || b.reqs[i+1].bell != q.bell {
			if ended {
				board.Ring(q.bell)
			}
			ended = false
		}
	}
	b.mu.Unlock()
	b.w.finishBatch(b, &done)
}

// finishBatch pushes the Done entry of a batch.
func (w *Worker) finishBatch(b *Batch, done *shm.Done) {
	// From now on clients may send their next requests, so the wait for the next batch
	// counts from here.
	w.spinFor.Store(spinFor(done.Finished - done.Started))
	w.answered.Store(done.Finished)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mail.Rounds.Add(uint64(b.rounds))
	ring, full := w.done.Push(done) // only the holder of mu pushes
	if full {
		panic("ringbatch: done ring is full") // cannot happen: it has room for twice the depth
	}
	if ring || done.Whole != 0 { // requests of a failed batch wait for the broker
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

// spinFor is how long a worker spins for the next batch after a batch that took that
// long: a quarter, within bounds. All in nanoseconds.
func spinFor(took int64) int64 {
	return min(max(took/4, int64(shm.LeastSpin)), int64(mostSpin))
}

const mostSpin = time.Millisecond
