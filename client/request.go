// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Request is a handle, passed by value and used by one goroutine at a time. After Release
// the methods of all copies return ErrReleased.
type Request struct {
	link   *link
	at     uint32 // first slot, counted from the start of the window
	handle uint32
}

// Claim takes slots for that many rows, and waits for them until ctx ends: ErrFull. dims
// are the sizes of all inputs' variable dimensions, in signature order. Claims of equal
// rows are served in order. Goroutines that hold requests while they claim more can wait
// for one another: give the client a window for all of them.
func (c *Client) Claim(ctx context.Context, rows int, dims ...int) (Request, error) {
	return c.claim(ctx, true, c.dialed, rows, dims, nil)
}

// TryClaim is Claim without waiting.
func (c *Client) TryClaim(rows int, dims ...int) (Request, error) {
	return c.claim(context.Background(), false, c.dialed, rows, dims, nil)
}

// claim is Claim or, without wait, TryClaim. If the model's signature is not sig, the
// error is ErrSignatureMismatch. q is the sequence that will keep the slots, or nil.
func (c *Client) claim(ctx context.Context, wait bool, sig *tensor.Signature, rows int, dims []int, q *Sequence) (Request, error) {
	if info := c.info.Load(); rows < 1 || rows > info.Window || rows > info.MaxBatchSize {
		return Request{}, info.badRows(rows)
	}
	var start int64
	for {
		l, err := q.holdSource()
		if l == nil && err == nil {
			l, err = c.holdLink(ctx, wait)
		}
		if err != nil {
			return Request{}, err
		}
		if has := &l.info.Signature; has != sig && !has.Equal(sig) {
			l.drop()
			return Request{}, c.changed(has)
		}
		if rows > l.info.Window || rows > l.info.MaxBatchSize { // a new link may have other limits
			l.drop()
			return Request{}, l.info.badRows(rows)
		}
		at, err := l.claimSlots(ctx, wait, rows, q, &start)
		if err == nil && at >= 0 {
			return l.request(at, rows, dims, start)
		}
		l.drop()
		if err != nil {
			return Request{}, err
		}
	}
}

// request makes slots that were claimed a request.
func (l *link) request(at, rows int, dims []int, start int64) (Request, error) {
	s := &l.slots[at]
	if err := l.setDims(s, dims); err != nil {
		l.mu.Lock()
		l.giveBack(at, rows)
		l.serveLine()
		l.mu.Unlock()
		l.drop()
		return Request{}, err
	}
	s.rows = uint32(rows)
	l.writeSteps(s, at, 0, nil)
	l.begin(s, at)
	if start != 0 {
		s.claimTook = shm.Now() - start
	}
	return Request{l, uint32(at), s.handle.Add(1)}, nil
}

// begin makes a slot ready for the inputs of a request.
func (l *link) begin(s *slot, at int) {
	s.state, s.level, s.cost, s.stream, s.parts.awaited = slotClaimed, defaultLevel, 0, false, false
	l.clearPadding(s, at)
	s.claimed, s.claimTook, s.deadline = 0, 0, 0
	if s.traced = l.times.Wanted(); s.traced || l.timing {
		s.claimed = shm.Now()
	}
}

// changed is the error for a caller that needs the signature of before.
func (c *Client) changed(now *tensor.Signature) error {
	return fmt.Errorf("%w: %s is %s now, it was %s when this client was dialled", status.ErrSignatureMismatch, c.model, now, c.dialed)
}

// defaultLevel in a commit asks for the model's default priority level.
const defaultLevel = -1

func (m *Model) badRows(rows int) error {
	if rows > m.MaxBatchSize {
		return fmt.Errorf("%w: %d rows, at most %d", status.ErrTooLarge, rows, m.MaxBatchSize)
	}
	return fmt.Errorf("%w: a request has 1..%d rows (this client's window), got %d", status.ErrRows, m.Window, rows)
}

func (l *link) setDims(s *slot, dims []int) error {
	inputs := l.session.Layout.Signature.Inputs
	want := tensor.VariableDims(inputs)
	if len(dims) != want {
		return fmt.Errorf("%w: the inputs have %d variable dimensions, %d sizes were given", status.ErrShape, want, len(dims))
	}
	n := 0
	for _, t := range inputs {
		for _, v := range t.Variable {
			if dims[n] < 0 || dims[n] > t.Shape[v] {
				return fmt.Errorf("%w: input %q dimension %d is 0..%d, got %d", status.ErrShape, t.Name, v, t.Shape[v], dims[n])
			}
			s.dims[n] = uint32(dims[n])
			n++
		}
	}
	return nil
}

// slot returns the first slot of a request that was not released.
func (r Request) slot() (*slot, error) {
	if r.link == nil {
		return nil, status.ErrReleased
	}
	s := &r.link.slots[r.at]
	if s.handle.Load() != r.handle {
		return nil, status.ErrReleased
	}
	return s, nil
}

// claimedSlot returns the first slot of a request that was not committed yet.
func (r Request) claimedSlot() (*slot, error) {
	s, err := r.slot()
	if err == nil && s.state != slotClaimed {
		err = status.ErrCommitted
	}
	return s, err
}

// committedSlot returns the first slot of a request that was committed.
func (r Request) committedSlot() (*slot, error) {
	s, err := r.slot()
	if err == nil && s.state == slotClaimed {
		err = status.ErrNotCommitted
	}
	return s, err
}

// Rows is the number of rows claimed.
func (r Request) Rows() int {
	s, err := r.slot()
	if err != nil {
		return 0
	}
	return int(s.rows)
}

// SetPriority chooses a priority level before Commit; 0 is most urgent.
func (r Request) SetPriority(level int) error {
	s, err := r.claimedSlot()
	if err != nil {
		return err
	}
	if levels := r.link.session.Settings.LevelCount(); level < 0 || level >= levels {
		return fmt.Errorf("%w: %d, the model has 0..%d", status.ErrNoLevel, level, levels-1)
	}
	s.level = int8(level)
	return nil
}

// SetCost sets each row's cost before Commit (max_batch_cost).
func (r Request) SetCost(cost int) error {
	s, err := r.claimedSlot()
	if err != nil {
		return err
	}
	if cost < 0 || cost > math.MaxUint16 {
		return fmt.Errorf("%w: cost is %d, must be 0..%d", status.ErrInvalid, cost, math.MaxUint16)
	}
	s.cost = uint16(cost)
	return nil
}

// SetDeadline replaces the deadline of Commit's context; zero: none.
func (r Request) SetDeadline(at time.Time) error {
	s, err := r.claimedSlot()
	if err != nil {
		return err
	}
	if s.deadline = 0; !at.IsZero() {
		s.deadline = max(1, shm.Until(at))
	}
	return nil
}

// Commit hands the request over. The deadline of ctx becomes its own.
func (r Request) Commit(ctx context.Context) error {
	one := [1]Request{r}
	return CommitAll(ctx, one[:])
}

// CommitAll commits requests of one client, all or none.
func CommitAll(ctx context.Context, requests []Request) error {
	deadline := int64(0) // none
	if d, ok := ctx.Deadline(); ok {
		deadline = max(1, shm.Until(d))
	}
	if len(requests) == 0 {
		return nil
	}
	for _, r := range requests {
		if _, err := r.slot(); err != nil {
			return err
		}
		if r.link != requests[0].link {
			return fmt.Errorf("%w: requests of different clients, or of before and after a broker restart", status.ErrInvalid)
		}
	}
	l := requests[0].link
	e := shm.Commit{Kind: shm.KindCommit, Deadline: deadline, Committed: shm.Now()}
	ring := false
	l.mu.Lock()
	for i, r := range requests {
		if l.slots[r.at].state != slotClaimed {
			for _, r := range requests[:i] {
				l.slots[r.at].state = slotClaimed
			}
			l.mu.Unlock()
			return status.ErrCommitted
		}
		l.slots[r.at].state = slotCommitted
	}
	for _, r := range requests {
		s := &l.slots[r.at]
		s.committed, s.cancel = e.Committed, false
		if e.Kind = shm.KindCommit; s.stream {
			e.Kind = shm.KindStream
			s.parts.attempt = l.board.Shown(l.first + r.at).Attempt()
		}
		l.gens[r.at]++
		e.Level, e.Cost, e.Rows, e.Slot, e.Gen, e.Dims = s.level, s.cost, s.rows, l.first+r.at, l.gens[r.at], s.dims
		if e.Deadline = deadline; s.deadline != 0 {
			e.Deadline = s.deadline
		}
		if s.ends = 0; e.Deadline != 0 {
			s.ends = e.Deadline + min(int64(endGrace), math.MaxInt64-e.Deadline)
		}
		if s.traced {
			t := l.times.Of(r.at, e.Gen)
			t.Gen, t.Asked, t.Claimed = e.Gen, s.claimed-s.claimTook, s.claimed
		}
		ring = l.push(&e) || ring
	}
	l.mu.Unlock()
	if ring {
		l.session.Doorbell.Ring()
	}
	return nil
}

// endGrace is how long the client waits, after the deadline of a request, for the
// broker to end it: the broker knows why it is late. If the broker does not run, the
// client ends the request.
const endGrace = 2 * time.Millisecond

// Wait returns the request's end. If ctx ends first, the request goes on.
func (r Request) Wait(ctx context.Context) error {
	s, err := r.committedSlot()
	if err != nil {
		return err
	}
	s.parts.awaited = false
	if err := r.await(ctx); err != nil {
		return err
	}
	return r.outcome(s)
}

// await waits for the request's end, or for its next part if the caller awaits that.
func (r Request) await(ctx context.Context) error {
	if r.link.isReady(r.at) {
		return nil
	}
	err := r.link.await(ctx, r.at, 0)
	if err == nil {
		return nil
	}
	if err = fromContext(err); errors.Is(err, status.ErrExpired) && r.link.await(context.Background(), r.at, shm.Now()+int64(endGrace)) == nil {
		return nil
	}
	return err
}

// Poll is Wait without waiting: ErrNotDone while it is in flight.
func (r Request) Poll() error {
	s, err := r.committedSlot()
	if err != nil {
		return err
	}
	if !r.link.hasEnded(r.at) {
		return status.ErrNotDone
	}
	return r.outcome(s)
}

func (r Request) outcome(s *slot) error {
	switch s.status {
	case status.OK:
		s.told = true
		return nil
	case status.ErrFailed, status.ErrWorkerDied:
		return &ended{s.status, r.link.board.Reason(r.link.first + r.at)}
	case status.ErrExpired, status.ErrNoWorker:
		if s.held { // the worker may be writing a reason
			return &ended{status: s.status}
		}
		reason := r.link.board.Reason(r.link.first + r.at)
		switch {
		case !strings.HasPrefix(reason, shm.ReasonNoWorker):
			reason = ""
		case s.status == status.ErrExpired:
			reason = s.status.Error() + ": " + reason
		}
		return &ended{s.status, reason}
	default:
		return &ended{status: s.status}
	}
}

// Cancel asks the broker to end the request, and does not wait.
func (r Request) Cancel() error {
	s, err := r.committedSlot()
	if err != nil {
		return err
	}
	l := r.link
	if l.hasEnded(r.at) {
		return nil
	}
	l.mu.Lock()
	ring := l.pushCancel(s, r.at)
	l.mu.Unlock()
	if ring {
		l.session.Doorbell.Ring()
	}
	return nil
}

// pushCancel sends the broker a cancel, once. The caller holds mu.
func (l *link) pushCancel(s *slot, at uint32) (ring bool) {
	if s.cancel {
		return false
	}
	s.cancel = true
	return l.push(&shm.Commit{Kind: shm.KindCancel, Rows: s.rows, Slot: l.first + at, Gen: l.gens[at]})
}

// Release gives the slots back, with all views; it cancels what runs.
func (r Request) Release() error {
	s, err := r.slot()
	if err != nil {
		return err
	}
	l := r.link
	ended := l.hasEnded(r.at) // claimed counts as ended: no worker has it
	ring := false
	l.mu.Lock()
	if !s.handle.CompareAndSwap(r.handle, r.handle+1) {
		l.mu.Unlock()
		return status.ErrReleased
	}
	switch {
	case s.kept:
		if !ended {
			ring = l.pushCancel(s, r.at)
		}
	case s.state == slotClaimed || ended && !s.held:
		s.state = slotFree
		l.giveBack(int(r.at), int(s.rows))
	default:
		if !ended {
			ring = l.pushCancel(s, r.at)
		}
		s.state = slotAbandoned
		l.abandoned = append(l.abandoned, r.at)
	}
	l.serveLine()
	kept := s.kept
	l.mu.Unlock()
	if ring {
		l.session.Doorbell.Ring()
	}
	if !kept {
		l.drop()
	}
	return nil
}
