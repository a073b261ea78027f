// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// A model with State hashes its state and its input to the next state, which is also the
// answer. The first two numbers of a state are the count of steps and the sequence's id.

// advance is number j of the state after a step.
func advance(state, x []int64, j int) int64 {
	switch {
	case j == 0:
		return state[0] + 1
	case j == 1 && state[0] > 0:
		return state[1]
	case j == 1:
		return x[1]
	}
	return Answer(state[j]^x[j], j) ^ state[0]
}

// RunStep answers row i of a batch. It calls half when half of the next state is written.
func RunStep(b *worker.Batch, i int, half func()) {
	x, state := worker.Row[int64](b.Input(0), i), worker.Row[int64](b.State(0), i)
	next := worker.Row[int64](b.NextState(0), i)
	for j := range next {
		if next[j] = advance(state, x, j); j == len(next)/2 {
			half()
		}
	}
	copy(worker.Row[int64](b.Output(0), i), next)
}

// Sequence is a client's sequence, beside the states that it should have.
type Sequence struct {
	seq   *client.Sequence
	rows  int
	rng   *rand.Rand
	state []int64 // of all rows, after the last delivered step
	Steps int     // delivered
}

// NewSequence begins a sequence of some rows, whose turns follow from the seed.
func NewSequence(ctx context.Context, c *client.Client, rows int, seed uint64) (*Sequence, error) {
	seq, err := c.Sequence(ctx, rows)
	if err != nil {
		return nil, err
	}
	return &Sequence{seq: seq, rows: rows, rng: rand.New(rand.NewPCG(seed, 5)), state: make([]int64, rows*Width)}, nil
}

// Close gives the slots back.
func (q *Sequence) Close() { _ = q.seq.Close() }

// input is random, with the id of each row's sequence.
func (q *Sequence) input() []int64 {
	x := make([]int64, len(q.state))
	for j := range x {
		x[j] = q.rng.Int64()
	}
	for row := range q.rows {
		x[row*Width] = 0 // no command
	}
	return x
}

// deliver checks the answer to x and moves on.
func (q *Sequence) deliver(x []int64, out tensor.Tensor) error {
	y, err := tensor.As[int64](out)
	if err != nil {
		return err
	}
	want := make([]int64, len(x))
	for i := range want {
		row := i / Width * Width
		want[i] = advance(q.state[row:row+Width], x[row:row+Width], i%Width)
	}
	q.state = want
	q.Steps++
	return q.compare("the answer", y)
}

// compare names the difference to the state that the sequence should have.
func (q *Sequence) compare(what string, got []int64) error {
	if slices.Equal(got, q.state) {
		return nil
	}
	for row := 0; row < len(got); row += Width {
		kind := ""
		switch n, want := got[row:row+Width], q.state[row:row+Width]; {
		case slices.Equal(n, want):
			continue
		case want[0] > 0 && n[0] > 0 && n[1] != want[1]:
			kind = "a foreign step"
		case n[0] < want[0]:
			kind = "a lost step"
		case n[0] > want[0]:
			kind = "a doubled step"
		default:
			kind = "wrong numbers"
		}
		return fmt.Errorf("%w: %s: %s in row %d of %d: %v, not %v", ErrWrongBytes, what, kind, row/Width, q.rows,
			got[row:row+Width], q.state[row:row+Width])
	}
	return fmt.Errorf("%w: %s has %d numbers", ErrWrongBytes, what, len(got))
}

// Check reads the state, which no step may have moved without an answer.
func (q *Sequence) Check(ctx context.Context) error {
	h, err := q.seq.State(ctx, "h")
	if err != nil {
		return err
	}
	got, err := tensor.As[int64](h)
	if err != nil {
		return err
	}
	return q.compare("the state", got)
}

// Turn takes a random turn: a step, a step that is given up at some point, or another
// use of the state. at is called after each part of a step, where the caller may die.
// An error is ErrWrongBytes or a named end of the step, which left the state as it was.
func (q *Sequence) Turn(ctx context.Context, at func(step string)) error {
	soon := time.Duration(q.rng.IntN(2000)) * time.Microsecond
	switch q.rng.IntN(16) {
	case 0:
		return q.Check(ctx)
	case 1:
		row := q.rng.IntN(q.rows)
		clear(q.state[row*Width : (row+1)*Width])
		return q.seq.Reset(row)
	case 2:
		return q.branch(ctx)
	case 3: // a deadline
		ctx, cancel := context.WithTimeout(ctx, soon)
		defer cancel()
		return q.step(ctx)
	case 4: // canceled at any moment
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer time.AfterFunc(soon, cancel).Stop()
		return q.step(ctx)
	case 5, 6, 7, 8:
		return q.stepByStep(ctx, q.rng.IntN(8), soon, at)
	case 9, 10:
		return q.stepByStep(ctx, -1, soon, at)
	default:
		return q.step(ctx)
	}
}

func (q *Sequence) step(ctx context.Context) error {
	x := q.input()
	outs, err := q.seq.Step(ctx, x)
	if err != nil {
		return err
	}
	return q.deliver(x, outs[0])
}

// branch goes on with a copy of the sequence, after the original has taken a step.
func (q *Sequence) branch(ctx context.Context) error {
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	fork, err := q.seq.Copy(short)
	if err != nil {
		return err // the window may be full
	}
	old := *q
	old.state = slices.Clone(q.state)
	err = old.step(ctx)
	old.Close()
	q.seq = fork
	return err
}

// stepByStep runs a step, and gives it up in one of several ways.
func (q *Sequence) stepByStep(ctx context.Context, giveUp int, soon time.Duration, at func(string)) error {
	req, err := q.seq.Request(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = req.Release() }()
	at(StepClaim)
	if giveUp == 0 {
		return nil
	}
	view, err := req.Input("x")
	if err != nil {
		return err
	}
	to, err := tensor.As[int64](view)
	if err != nil {
		return err
	}
	x := q.input()
	n := copy(to, x[:len(x)/2])
	at(StepWrite)
	copy(to[n:], x[n:])
	if giveUp == 1 {
		return nil
	}
	if err := req.Commit(ctx); err != nil {
		return err
	}
	at(StepCommit)
	switch giveUp {
	case 2: // without a look
		return nil
	case 3: // after a while, in which the answer may have come
		time.Sleep(soon)
		return nil
	case 4: // the wait ends first, and the answer may come after it
		err := WaitFor(&req, soon/4)
		if err == nil {
			break
		}
		time.Sleep(soon)
		return err
	case 5: // whether the cancel or the answer comes first
		time.Sleep(soon / 4)
		if err := req.Cancel(); err != nil {
			return err
		}
	}
	if err := req.Wait(ctx); err != nil {
		return err
	}
	at(StepRead)
	out, err := req.Output("y")
	if err != nil {
		return errors.Join(ErrWrongBytes, err)
	}
	if err := q.deliver(x, out); err != nil {
		return err
	}
	at(StepRelease)
	return nil
}
