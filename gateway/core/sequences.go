// SPDX-License-Identifier: Apache-2.0

package core

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
)

// SequenceID is a caller's name of a sequence: a number, or a text. The zero value is
// no sequence.
type SequenceID struct {
	Number uint64
	Text   string
}

func (id SequenceID) String() string {
	if id.Text != "" {
		return strconv.Quote(id.Text)
	}
	return strconv.FormatUint(id.Number, 10)
}

// TextSequenceID is the id of that text.
func TextSequenceID(text []byte) (SequenceID, error) {
	if len(text) > maxSequenceID {
		return SequenceID{}, BadRequest("a sequence_id of %d bytes; it is to be a whole number, or text of at most %d",
			len(text), maxSequenceID)
	}
	return SequenceID{Text: string(text)}, nil
}

// ErrSequenceID refuses an id of another type.
var ErrSequenceID = BadRequest("sequence_id is to be a whole number or a text")

// Step is a request's place in its sequence.
type Step struct {
	ID         SequenceID
	Start, End bool
}

// sequences are the sequences of all models: Triton's sequence extension.
//
//	unknown ── start ──► begun ── step, start ──► begun
//	   ▲                   │
//	   └───────────────────┴─ end; a start that fails; idle; the state is lost
type sequences struct {
	idle  time.Duration
	mu    sync.Mutex
	byKey map[sequenceKey]*sequence
}

type sequenceKey struct {
	model    string // or alias, as the caller named it
	identity string // of the caller
	id       SequenceID
}

// sequence is a sequence that has begun, or that a request asks for.
type sequence struct {
	turn *semaphore.Weighted // one step at a time, in the order of arrival

	// The step whose turn it is changes these.
	state   *client.Sequence // nil: the sequence has not begun
	model   *Model           // a sequence of an alias stays with one model
	rows    int
	address string // of the caller
	share   heldShare

	steps int       // that run or wait; under sequences.mu
	left  time.Time // end of the last step
	timer *time.Timer
}

func (c *Call) sequenceKey() sequenceKey {
	return sequenceKey{c.ModelName(), c.Caller.identity, c.Step.ID}
}

// HasState reports whether a model keeps state for sequences.
func (g *Gateway) HasState(name, version string) bool {
	k, _ := g.Models.find(name, version, false)
	return k != nil && len(k.Sig.State) > 0
}

// join queues a step behind the earlier steps of its sequence. Call leave when it has ended.
func (s *sequences) join(key sequenceKey) (*sequence, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.byKey[key]
	if q == nil {
		q = &sequence{turn: semaphore.NewWeighted(1)}
		s.byKey[key] = q
	}
	if q.steps == maxSteps {
		return nil, Refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "sequence %v has %d steps waiting, no more are taken",
			key.id, maxSteps)
	}
	q.steps++
	return q, nil
}

func (s *sequences) leave(key sequenceKey, q *sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q.left = time.Now()
	switch q.steps--; {
	case q.steps > 0:
	case q.state == nil:
		delete(s.byKey, key)
		if q.timer != nil {
			q.timer.Stop()
		}
	case q.timer == nil:
		q.timer = time.AfterFunc(s.idle, func() { s.endIdle(key, q) })
	default:
		q.timer.Reset(s.idle)
	}
}

// endIdle ends a sequence, unless a step came meanwhile.
func (s *sequences) endIdle(key sequenceKey, q *sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.steps == 0 && time.Since(q.left) >= s.idle && s.byKey[key] == q {
		delete(s.byKey, key)
		q.close()
	}
}

// closeAll ends the sequences whose steps have ended.
func (s *sequences) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, q := range s.byKey {
		if q.steps == 0 {
			delete(s.byKey, key)
			q.close()
		}
	}
}

func (s *sequences) end(q *sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q.close()
}

// close gives the slots back. The caller holds sequences.mu.
func (q *sequence) close() {
	if q.state == nil {
		return
	}
	_ = q.state.Close()
	q.share.giveBack()
	q.model.G.Limits.leave(q.address)
	if q.model.openSequences--; q.model.openSequences == 0 && q.model.gone {
		go q.model.sequences.close()
	}
	q.state, q.model = nil, nil
}

func (s *Step) prepare(*Call) error {
	if s.ID == (SequenceID{}) {
		return BadRequest("sequence_start and sequence_end need a sequence_id, which is neither 0 nor empty")
	}
	return nil
}

func (*Step) inputBytes(_ *Call, _ *Input, shaped int) int { return shaped }

func (*Step) release() {} // the sequence keeps its slots

// run runs the call as a step of its sequence, after the steps that came before it.
// The outputs are copied: the next step does not wait until the caller has read them.
func (*Step) run(ctx context.Context, c *Call) error {
	s, key := &c.Model.G.sequences, c.sequenceKey()
	q, err := s.join(key)
	if err != nil {
		return err
	}
	defer s.leave(key, q)
	if !q.turn.TryAcquire(1) {
		if c.OnWait != nil {
			defer c.OnWait()
		}
		if err := q.turn.Acquire(ctx, 1); err != nil {
			return err
		}
	}
	defer q.turn.Release(1)
	if c.Caller.Use.isSuspect() { // sequences cannot move to another client
		return Refuse(http.StatusTooManyRequests, codes.ResourceExhausted,
			"too many requests of this caller have just failed in workers: sequence %v keeps its state, try again", c.Step.ID)
	}
	if c.Step.Start {
		err = c.beginSequence(ctx, q)
	} else {
		err = c.continueSequence(q)
	}
	if err != nil {
		return err
	}
	if err = c.step(ctx, q); failedInWorker(err) {
		c.Caller.Use.failed()
	}
	lost := errors.Is(err, status.ErrStateLost) || errors.Is(err, status.ErrBrokerGone)
	if lost || err != nil && c.Step.Start || err == nil && c.Step.End {
		s.end(q)
	}
	if lost && !c.Step.Start {
		return fmt.Errorf("%w: sequence %v of model %q: begin again with sequence_start", status.ErrStateLost, c.Step.ID, c.ModelName())
	}
	return err
}

// beginSequence claims slots for a new sequence, which replaces an earlier one.
func (c *Call) beginSequence(ctx context.Context, q *sequence) error {
	g := c.Model.G
	g.sequences.end(q)
	_, window := c.Model.lane(2)
	lane := &c.Model.sequences
	a, err := c.attach(ctx, lane, window)
	if err != nil {
		return err
	}
	m := a.Model()
	if err := c.takeShare(ctx, lane, shareOf(m.Window, min(m.MaxBatchSize, m.Window))); err != nil {
		return err
	}
	if c.OnWait != nil {
		defer c.OnWait()
	}
	wait, cancel := context.WithTimeout(ctx, g.Cfg.ClaimWait)
	defer cancel()
	state, err := a.Sequence(wait, c.rows)
	switch {
	case errors.Is(err, status.ErrFull) && ctx.Err() == nil:
		return Refuse(http.StatusServiceUnavailable, codes.ResourceExhausted,
			"sequences of model %q use all its %d slots (--window): end some, or try again", c.Model.Name, m.Window)
	case err != nil:
		lane.forgetAfter(err, a)
		return err
	}
	q.state, q.model, q.rows, q.address = state, c.Model, c.rows, origin(c.Caller.Remote.Addr()).String()
	g.sequences.mu.Lock()
	q.model.openSequences++
	g.sequences.mu.Unlock()
	g.Limits.join(q.address) // a caller without a connection keeps its share
	q.share, c.share = c.share, heldShare{}
	return nil
}

// continueSequence checks that a step fits its sequence.
func (c *Call) continueSequence(q *sequence) error {
	switch {
	case q.state == nil:
		return BadRequest("model %q has no sequence %v: begin it with sequence_start (a sequence ends after %v without a step)",
			c.ModelName(), c.Step.ID, c.Model.G.sequences.idle)
	case !q.model.Sig.Equal(&c.Model.Sig): // Check has used another one
		return BadRequest("sequence %v was begun with %s, model %q is %s now", c.Step.ID, &q.model.Sig, c.Model.Name, &c.Model.Sig)
	case q.rows != c.rows:
		return fmt.Errorf("%w: sequence %v has %d, this step has %d", status.ErrRows, c.Step.ID, q.rows, c.rows)
	}
	c.Model = q.model
	return nil
}

func (c *Call) step(ctx context.Context, q *sequence) error {
	most := 0
	for i := range c.Outputs {
		most += c.rows * c.Model.Sig.Outputs[c.Outputs[i].index].RowBytes()
	}
	if most > SmallBuffer { // before the step: its answer moves the state on
		if err := c.Take(most); err != nil {
			return err
		}
	}
	r, err := q.state.Request(ctx, c.dims...)
	if err != nil {
		return err
	}
	defer r.Release()
	if err := c.execute(ctx, r); err != nil {
		return err
	}
	if err := c.view(r); err != nil {
		q.state.Undo()
		return err
	}
	for i := range c.Outputs {
		o := &c.Outputs[i]
		o.Parts = append(o.Parts[:0], bytes.Join(o.Parts, nil))
	}
	return nil
}
