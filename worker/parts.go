// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// shownRow is how far the growing output of a row is.
type shownRow struct {
	steps    uint32
	attempt  uint32
	streamed bool   // its client takes parts
	q        uint32 // its request
}

// beginAttempts notes the rows whose clients take parts.
func (b *Batch) beginAttempts() {
	if b.shown == nil {
		return
	}
	for i := range b.reqs {
		q := &b.reqs[i]
		for row := q.row; row < q.row+q.rows; row++ {
			b.shown[row] = shownRow{q: uint32(i)}
		}
		if b.w.session.Board.IsStreamed(q.slot, q.gen) && !b.w.session.Info.HandsOn {
			b.shown[q.row].streamed = true
			b.beginAttempt(q)
		}
	}
}

func (b *Batch) beginAttempt(q *request) {
	s := &b.shown[q.row]
	s.steps, s.attempt = 0, b.w.session.Board.BeginAttempt(q.slot, &b.w.session.Layout.Outputs[b.w.growing])
}

// Streamed reports whether a row's client takes parts. The other rows need no Show.
func (b *Batch) Streamed(row int) bool { return b.shown != nil && b.shown[row].streamed }

// Show says that the first n steps of a row's growing output are written, and stay: the
// first output of which only the first dimension varies. A client that takes parts
// (client.Stream) gets them now. The row's size is n, unless it grows further. n of 0 takes
// back what was shown: the row begins again, and its stream says so.
func (b *Batch) Show(row, n int) error {
	w := b.w
	switch layout := w.session.Layout; {
	case b.shown == nil:
		return shm.NoGrowing(&layout.Signature)
	case row < 0 || row >= len(b.slots):
		return fmt.Errorf("%w: row %d of a batch of %d", status.ErrRows, row, len(b.slots))
	case n != 0 && n < int(b.shown[row].steps):
		return fmt.Errorf("%w: %d steps of row %d were shown already, and stay", status.ErrInvalid, b.shown[row].steps, row)
	case n > layout.Outputs[w.growing].Spec.Shape[0]:
		return fmt.Errorf("%w: output %s cannot grow to %d", status.ErrShape, layout.Outputs[w.growing].Spec, n)
	}
	s := &b.shown[row]
	was := s.steps
	s.steps, b.outDims[row][w.growDim] = uint32(n), uint32(n)
	switch q := &b.reqs[s.q]; {
	case s.steps == was || !s.streamed || !isOpen(w.session.Board, q.slot, q.gen):
	case n == 0:
		b.beginAttempt(q)
	default:
		w.session.Board.Show(q.slot, s.attempt, s.steps)
		w.session.Board.Ring(q.bell)
	}
	return nil
}

// tookBack returns an error if a row of a request is smaller than it was shown.
func (b *Batch) tookBack(q *request) error {
	for row := q.row; b.shown != nil && row < q.row+q.rows; row++ {
		if size := b.outDims[row][b.w.growDim]; size < b.shown[row].steps {
			return fmt.Errorf("the worker took back steps of row %d: it showed %d, and answers %d", row, b.shown[row].steps, size)
		}
	}
	return nil
}
