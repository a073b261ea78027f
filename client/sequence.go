// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Sequence is sequences of a model with state, one for each row. A step finds the state
// of the last answered step; one that fails leaves it as it was. A Sequence keeps slots
// until Close. One goroutine at a time uses it: others get ErrNotDone. With another
// broker every method returns ErrStateLost until Reset, unless the state is zero.
type Sequence struct {
	c      *Client
	rows   int
	link   *link // nil: to be claimed
	at     uint32
	half   int    // of each row: the present state
	fresh  []bool // rows whose state is zero
	begun  []bool // rows that were fresh in the step under way, or in the last one if moved
	moved  bool   // half has changed for the last step: Undo changes it back
	undone bool   // the last step does not change half
	done   bool   // closed
	busy   atomic.Bool
	given  uint32 // handle of the latest Request
	from   *link  // a copy's: where to claim; then nil
}

func (q *Sequence) enter() error {
	if !q.busy.CompareAndSwap(false, true) {
		return fmt.Errorf("%w: this sequence is busy in another goroutine: one at a time uses it", status.ErrNotDone)
	}
	return nil
}

// Sequence begins a sequence for each row, with a state of zero.
func (c *Client) Sequence(ctx context.Context, rows int) (*Sequence, error) {
	if len(c.dialed.State) == 0 {
		return nil, fmt.Errorf("%w: the model %q has no state: use Infer or Claim", status.ErrInvalid, c.model)
	}
	return c.sequence(ctx, rows, nil)
}

// sequence claims from a link, or from the present one.
func (c *Client) sequence(ctx context.Context, rows int, from *link) (*Sequence, error) {
	q := &Sequence{c: c, rows: rows, fresh: make([]bool, max(rows, 0)), begun: make([]bool, max(rows, 0)), from: from}
	if err := q.claim(ctx); err != nil {
		return nil, err
	}
	return q, nil
}

// holdSource holds the link of the sequence that q copies; nil for others.
func (q *Sequence) holdSource() (*link, error) {
	if q == nil || q.from == nil {
		return nil, nil
	}
	if q.from.dead.Load() {
		return nil, status.ErrStateLost
	}
	q.from.hold() // the other sequence holds it, too
	return q.from, nil
}

func (q *Sequence) claim(ctx context.Context) error {
	dims := make([]int, tensor.VariableDims(q.c.dialed.Inputs))
	r, err := q.c.claim(ctx, true, q.c.dialed, q.rows, dims, q)
	if err != nil {
		return err
	}
	q.link, q.at, q.half, q.moved, q.from = r.link, r.at, 0, false, nil
	q.link.mu.Lock()
	q.link.slots[q.at].kept = true
	q.link.kept += q.rows
	q.link.wakeClaims() // some may have no room now
	q.link.mu.Unlock()
	for i := range q.fresh {
		q.fresh[i] = true
	}
	return nil
}

// settle waits until the last step has ended and no worker has its slots, and moves on
// to the state that the step left.
func (q *Sequence) settle(ctx context.Context) (*slot, error) {
	if q.done {
		return nil, status.ErrClosed
	}
	if q.link == nil {
		if err := q.claim(ctx); err != nil {
			return nil, err
		}
	}
	l := q.link
	s := &l.slots[q.at]
	if s.state == slotCommitted && s.handle.Load() == q.given {
		return nil, fmt.Errorf("%w: a step of this sequence is under way: Wait for its end, or Release it", status.ErrNotDone)
	}
	if s.state == slotCommitted && !l.hasEnded(q.at) {
		if err := l.await(ctx, q.at, 0); err != nil {
			return nil, fromContext(err)
		}
	}
	if l.dead.Load() {
		if !q.isZero() {
			return nil, status.ErrStateLost
		}
		q.leave()
		return q.settle(ctx)
	}
	if s.state == slotEnded && s.told && !q.undone {
		q.half ^= 1
		q.moved = true
	} else if !q.moved {
		if err := q.awaitWorker(ctx, s); err != nil {
			return nil, err
		}
		for i, begun := range q.begun {
			q.fresh[i] = q.fresh[i] || begun
		}
		clear(q.begun)
	}
	s.state, s.held, s.told = slotClaimed, false, false
	return s, nil
}

// isZero reports that no row has begun, or that all were reset.
func (q *Sequence) isZero() bool {
	if s := &q.link.slots[q.at]; s.state == slotEnded && s.told && !q.undone {
		return false
	}
	for i, fresh := range q.fresh {
		if !fresh && (q.moved || !q.begun[i]) {
			return false
		}
	}
	return true
}

// awaitWorker waits while a worker may write into the slots of a step that ended early. No
// wake-up comes when it is done.
func (q *Sequence) awaitWorker(ctx context.Context, s *slot) error {
	for s.held && !q.link.dead.Load() {
		w := q.link.board.Word(q.link.first + q.at)
		if s.held = w.Generation() != q.link.gens[q.at] || w.Held(); !s.held {
			break
		}
		select {
		case <-ctx.Done():
			return fromContext(ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
	if q.link.dead.Load() {
		return status.ErrStateLost
	}
	return nil
}

// Request returns the slots for the next step, once no worker uses them. The state
// advances when the caller learns of the answer (Wait, Poll, Output), not with Release
// alone.
func (q *Sequence) Request(ctx context.Context, dims ...int) (Request, error) {
	if err := q.enter(); err != nil {
		return Request{}, err
	}
	defer q.busy.Store(false)
	return q.request(ctx, dims)
}

func (q *Sequence) request(ctx context.Context, dims []int) (Request, error) {
	s, err := q.settle(ctx)
	if err != nil {
		return Request{}, err
	}
	if err := q.link.setDims(s, dims); err != nil {
		return Request{}, err
	}
	q.link.writeSteps(s, int(q.at), q.half, q.fresh)
	copy(q.begun, q.fresh)
	clear(q.fresh)
	q.moved, q.undone = false, false
	q.link.begin(s, int(q.at))
	q.given = s.handle.Add(1)
	return Request{q.link, q.at, q.given}, nil
}

// Step is Infer for the next step. After an error the state is as before.
func (q *Sequence) Step(ctx context.Context, inputs ...any) ([]tensor.Tensor, error) {
	if err := q.enter(); err != nil {
		return nil, err
	}
	defer q.busy.Store(false)
	sig := q.c.dialed
	tensors, rows, dims, err := q.c.checkInputs(sig, inputs)
	if err == nil && rows != q.rows {
		err = fmt.Errorf("%w: %d rows for a sequence of %d", status.ErrRows, rows, q.rows)
	}
	if err != nil {
		return nil, err
	}
	r, err := q.request(ctx, dims)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	if err := r.write(sig, tensors); err != nil {
		return nil, err
	}
	if err := r.Commit(ctx); err != nil {
		return nil, err
	}
	if err := r.Wait(ctx); err != nil {
		return nil, err
	}
	outs, err := r.copyOutputs()
	if err != nil {
		q.undo()
	}
	return outs, err
}

// Undo discards the last step's state. Call it before the next step.
func (q *Sequence) Undo() {
	if q.enter() == nil { // else there is a later step
		q.undo()
		q.busy.Store(false)
	}
}

func (q *Sequence) undo() {
	if q.link != nil && !q.done { // else the slots are not, or no longer, this sequence's
		q.undone = true
		if q.moved { // to the other half, which no step has written since
			q.half, q.moved = q.half^1, false
			for i, begun := range q.begun {
				q.fresh[i] = q.fresh[i] || begun
			}
			clear(q.begun)
		}
	}
}

// Reset makes the state of these rows, or of all, zero.
func (q *Sequence) Reset(rows ...int) error {
	if err := q.enter(); err != nil {
		return err
	}
	defer q.busy.Store(false)
	if q.done {
		return status.ErrClosed
	}
	lost := q.link != nil && q.link.dead.Load() && !q.isZero()
	chosen := make([]bool, q.rows)
	for _, row := range rows {
		if row < 0 || row >= q.rows {
			return fmt.Errorf("%w: row %d of a sequence of %d", status.ErrRows, row, q.rows)
		}
		if chosen[row] {
			return fmt.Errorf("%w: row %d is given twice: give each row's number once; a mask is not taken", status.ErrRows, row)
		}
		if lost {
			return fmt.Errorf("%w (all rows are gone: reset them all)", status.ErrStateLost)
		}
		chosen[row] = true
	}
	for row, fresh := range chosen {
		q.fresh[row] = q.fresh[row] || fresh
	}
	if len(rows) > 0 {
		return nil
	}
	for i := range q.fresh {
		q.fresh[i] = true
	}
	if lost {
		q.leave()
	}
	return nil
}

// State is a copy of the present state of that name, for all rows.
func (q *Sequence) State(ctx context.Context, name string) (tensor.Tensor, error) {
	if err := q.enter(); err != nil {
		return tensor.Tensor{}, err
	}
	defer q.busy.Store(false)
	k, err := q.findState(ctx, name)
	if err != nil {
		return tensor.Tensor{}, err
	}
	spec := q.c.dialed.State[k]
	t := tensor.Tensor{Name: name, DType: spec.DType, Shape: append([]int{q.rows}, spec.Shape...)}
	t.Data = make([]byte, q.rows*spec.RowBytes())
	for row, fresh := range q.fresh {
		if !fresh {
			copy(t.Row(row).Data, q.row(k, row))
		}
	}
	return t, nil
}

// SetState replaces the present state of t's name, for all rows.
func (q *Sequence) SetState(ctx context.Context, t tensor.Tensor) error {
	if err := q.enter(); err != nil {
		return err
	}
	defer q.busy.Store(false)
	k, err := q.findState(ctx, t.Name)
	if err != nil {
		return err
	}
	if rows, _, err := tensor.CheckInput(&q.c.dialed.State[k], &t, nil); err != nil {
		return err
	} else if rows != q.rows {
		return fmt.Errorf("%w: the state %q of %d rows for a sequence of %d", status.ErrRows, t.Name, rows, q.rows)
	}
	for row, fresh := range q.fresh {
		for other := range q.c.dialed.State {
			if fresh && other != k {
				clear(q.row(other, row))
			}
		}
		copy(q.row(k, row), t.Row(row).Data)
	}
	clear(q.fresh)
	return nil
}

// Copy begins another sequence with the present state of this one.
func (q *Sequence) Copy(ctx context.Context) (*Sequence, error) {
	if err := q.enter(); err != nil {
		return nil, err
	}
	defer q.busy.Store(false)
	if _, err := q.findState(ctx, q.c.dialed.State[0].Name); err != nil {
		return nil, err
	}
	other, err := q.c.sequence(ctx, q.rows, q.link)
	if err != nil {
		return nil, err
	}
	copy(other.fresh, q.fresh)
	for k := range q.c.dialed.State {
		for row := range q.rows {
			copy(other.row(k, row), q.row(k, row))
		}
	}
	return other, nil
}

// Close gives the slots back; ErrNotDone while a goroutine is in Step.
func (q *Sequence) Close() error {
	if err := q.enter(); err != nil {
		return err
	}
	defer q.busy.Store(false)
	if q.done {
		return nil
	}
	q.done = true
	q.leave()
	return nil
}

// leave gives the slots back. The next settle claims others.
func (q *Sequence) leave() {
	if q.link == nil {
		return
	}
	s := &q.link.slots[q.at]
	q.link.mu.Lock()
	s.kept = false
	q.link.kept -= q.rows
	q.link.mu.Unlock()
	_ = Request{q.link, q.at, s.handle.Add(1)}.Release()
	q.link = nil
}

// findState is the index of a state. No worker has the sequence then, and all states are on the host.
func (q *Sequence) findState(ctx context.Context, name string) (int, error) {
	if _, err := q.settle(ctx); err != nil {
		return 0, err
	}
	found := -1
	for k, t := range q.c.dialed.State {
		if t.OnDevice() {
			return 0, fmt.Errorf("%w: the state %s lies in device memory: this process cannot read or write it", status.ErrInvalid, t)
		}
		if t.Name == name {
			found = k
		}
	}
	if found < 0 {
		return 0, fmt.Errorf("%w: no state %q; the model is %s", status.ErrInvalid, name, q.c.dialed)
	}
	return found, nil
}

// row is the present state of a row, in place.
func (q *Sequence) row(k, row int) []byte {
	l := q.link
	return l.session.Layout.HalfRow(l.session.Planes.Bytes(), k, l.first+q.at+uint32(row), q.half)
}

// writeSteps writes the Step of each row. fresh may be nil: all rows are.
func (l *link) writeSteps(s *slot, at, half int, fresh []bool) {
	if l.session.Layout.Step == nil {
		return
	}
	for row := range int(s.rows) {
		step := shm.Step(half)
		if fresh == nil || fresh[row] {
			step |= shm.StepFresh
		}
		l.session.Layout.WriteStep(l.session.Planes.Bytes(), l.first+uint32(at+row), step)
	}
}
