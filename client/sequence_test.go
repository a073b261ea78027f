// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// summing is a model whose state is the sum of all inputs of a sequence.
func summing(t *testing.T) broker.ModelConfig {
	t.Helper()
	sig, err := tensor.ParseSignature([]string{"x:i64[1]"}, []string{"y:i64[1]"}, "sum:i64[1]")
	must.Do(t, err)
	return broker.ModelConfig{Signature: sig}
}

// sum fails requests below 0, after it has spoilt their next state.
func sum(_ context.Context, b *worker.Batch) error {
	for i := range b.Len() {
		q := b.Request(i)
		for row := q.Row; row < q.Row+q.Rows; row++ {
			x := worker.Row[int64](b.Input(0), row)[0]
			next := worker.Row[int64](b.State(0), row)[0] + x
			if b.Fresh(row) && next != x {
				return fmt.Errorf("a fresh row has the state %d", next-x)
			}
			if x < 0 {
				next = -1
				b.Fail(i, errors.New("below 0"))
			}
			worker.Row[int64](b.NextState(0), row)[0] = next
			worker.Row[int64](b.Output(0), row)[0] = next
		}
	}
	return nil
}

func begin(t *testing.T, c *client.Client, rows int) *client.Sequence {
	t.Helper()
	q, err := c.Sequence(soon(t), rows)
	must.Do(t, err)
	t.Cleanup(func() { q.Close() })
	return q
}

// step expects the sums, or an error if there are none.
func step(t *testing.T, q *client.Sequence, x []int64, want ...int64) error {
	t.Helper()
	outs, err := q.Step(soon(t), x)
	if err != nil {
		if len(want) > 0 {
			t.Errorf("step %v: %v", x, err)
		}
		return err
	}
	if y, err := tensor.As[int64](outs[0]); err != nil || !slices.Equal(y, want) {
		t.Errorf("step %v: %v %v, not %v", x, y, err, want)
	}
	return nil
}

func TestASequenceKeepsItsState(t *testing.T) {
	r := newRing(t, summing(t))
	r.work(sum)
	c := r.dial(client.WithWindow(16))
	one, three := begin(t, c, 1), begin(t, c, 3)
	for i := range int64(5) {
		step(t, one, []int64{1}, i+1)
		step(t, three, []int64{1, 10, 100}, i+1, 10*(i+1), 100*(i+1))
	}
	if outs, err := c.Infer(soon(t), []int64{7}); err != nil || outs[0].Data[0] != 7 {
		t.Errorf("a request of no sequence: %v %v", outs, err)
	}
	must.Do(t, three.Reset(1))
	step(t, three, []int64{1, 10, 100}, 6, 10, 600)
	must.Do(t, one.Reset())
	one.Undo() // of no step: nothing
	step(t, one, []int64{4}, 4)
	step(t, one, []int64{5}, 9)
	one.Undo()
	step(t, one, []int64{6}, 10)
	must.Do(t, one.Close())
	one.Undo()
	step(t, begin(t, c, 1), []int64{2}, 2) // in the slot of the one before
	must.Fail(t, "after Close", step(t, one, []int64{1}), status.ErrClosed)
	must.Fail(t, "rows", step(t, three, []int64{1}), status.ErrRows)
}

func TestAStepThatIsNotAnsweredLeavesTheState(t *testing.T) {
	r := newRing(t, summing(t))
	c := r.dial()
	q := begin(t, c, 2)
	w := r.taker(2)
	run := func() { // what the worker does with the next batch
		b, err := w.Next(soon(t))
		must.Do(t, err)
		must.Do(t, sum(soon(t), b))
		must.Do(t, b.Complete())
	}
	answered := func(x []int64, want ...int64) {
		t.Helper()
		go run()
		step(t, q, x, want...)
	}
	failed := func() {
		t.Helper()
		go run()
		must.Fail(t, "failed", step(t, q, []int64{1, -1}), status.ErrFailed)
	}
	failed() // a sequence that begins with a failure still begins with zero
	answered([]int64{1, 2}, 1, 2)
	failed()
	answered([]int64{1, 2}, 2, 4)
	must.Do(t, q.Reset(0))
	failed() // and remembers its reset
	answered([]int64{1, 2}, 1, 6)

	cancel := func(req client.Request) error {
		must.Check(t, req.Cancel())
		must.Fail(t, "canceled", req.Wait(soon(t)), status.ErrCanceled)
		return nil
	}
	for _, give := range []func(client.Request) error{cancel, client.Request.Release} {
		req, err := q.Request(soon(t))
		must.Do(t, err)
		must.Do(t, req.Commit(soon(t)))
		b, err := w.Next(soon(t))
		must.Do(t, err)
		must.Do(t, give(req)) // while the worker runs it
		answer := make(chan error, 1)
		go func() { answer <- step(t, q, []int64{1, 1}, 2, 7) }()
		select {
		case err := <-answer:
			t.Errorf("a step beside its predecessor: %v", err)
		case <-time.After(20 * time.Millisecond):
		}
		must.Do(t, sum(soon(t), b)) // the canceled step writes its state, in vain
		b.Complete()
		run()
		must.Do(t, <-answer)
		answered([]int64{0, 0}, 2, 7)
		must.Do(t, q.SetState(soon(t), tensor.Tensor{Name: "sum", DType: tensor.I64, Shape: []int{2, 1},
			Data: append(binary(1), binary(6)...)}))
	}
	w.Close()
	ctx, end := context.WithTimeout(soon(t), 20*time.Millisecond)
	defer end()
	_, err := q.Step(ctx, []int64{5, 5}) // no worker takes it
	must.Fail(t, "expired", err, status.ErrExpired)
	r.work(sum)
	step(t, q, []int64{1, 1}, 2, 7)
}

func binary(x byte) []byte { return []byte{x, 0, 0, 0, 0, 0, 0, 0} }

func TestAStateIsReadSetAndCopied(t *testing.T) {
	r := newRing(t, summing(t))
	r.work(sum)
	q := begin(t, r.dial(), 2)
	is := func(q *client.Sequence, want ...int64) {
		t.Helper()
		s, err := q.State(soon(t), "sum")
		must.Do(t, err)
		if v, err := tensor.As[int64](s); err != nil || !slices.Equal(v, want) || !slices.Equal(s.Shape, []int{2, 1}) {
			t.Errorf("state %v %v %v, not %v", v, s.Shape, err, want)
		}
	}
	is(q, 0, 0)
	step(t, q, []int64{1, 2}, 1, 2)
	is(q, 1, 2)
	other, err := q.Copy(soon(t))
	must.Do(t, err)
	step(t, q, []int64{1, 2}, 2, 4)
	step(t, other, []int64{10, 20}, 11, 22)
	saved, err := q.State(soon(t), "sum")
	must.Do(t, err)
	must.Do(t, q.Reset())
	is(q, 0, 0)
	must.Do(t, q.SetState(soon(t), saved))
	step(t, q, []int64{1, 1}, 3, 5)

	_, err = q.State(soon(t), "h")
	must.Fail(t, "unknown", err, status.ErrInvalid)
	short, wide, one, kind := saved, saved, saved, saved
	short.Data, wide.Shape, kind.DType = saved.Data[:8], []int{1, 2}, tensor.F64
	one.Shape, one.Data = []int{1, 1}, saved.Data[:8]
	for want, c := range map[error]tensor.Tensor{status.ErrSize: short, status.ErrShape: wide, status.ErrRows: one, status.ErrDType: kind} {
		must.Fail(t, "set", q.SetState(soon(t), c), want)
	}
	is(q, 3, 5)
}

func TestALookAtTheStateLeavesARowFresh(t *testing.T) {
	r := newRing(t, summing(t))
	r.work(func(_ context.Context, b *worker.Batch) error { // the state begins with 100
		for row := range b.Rows() {
			next := worker.Row[int64](b.State(0), row)[0] + worker.Row[int64](b.Input(0), row)[0]
			if b.Fresh(row) {
				next += 100
			}
			worker.Row[int64](b.NextState(0), row)[0] = next
			worker.Row[int64](b.Output(0), row)[0] = next
		}
		return nil
	})
	q := begin(t, r.dial(), 2)
	step(t, q, []int64{1, 2}, 101, 102)
	must.Do(t, q.Reset(1))
	s, err := q.State(soon(t), "sum")
	must.Do(t, err)
	other, err := q.Copy(soon(t))
	must.Do(t, err)
	step(t, q, []int64{1, 2}, 102, 102)
	step(t, other, []int64{1, 2}, 102, 102)
	must.Do(t, q.Reset(1))
	must.Do(t, q.SetState(soon(t), s))
	step(t, q, []int64{1, 2}, 102, 2)
}

func TestAStateThatTheWorkerForgotFailsTheStepByName(t *testing.T) {
	r := newRing(t, summing(t))
	r.work(func(_ context.Context, b *worker.Batch) error {
		for row := range b.Rows() {
			worker.Row[int64](b.Output(0), row)[0] = 0
		}
		return nil
	})
	err := step(t, begin(t, r.dial(), 1), []int64{1})
	if must.Fail(t, "forgotten", err, status.ErrFailed); !strings.Contains(fmt.Sprint(err), `state "sum"`) {
		t.Error(err)
	}
}

func TestASequenceNeedsAModelWithState(t *testing.T) {
	r := newRing(t, plain(t))
	_, err := r.dial().Sequence(soon(t), 1)
	must.Fail(t, "no state", err, status.ErrInvalid)
	for _, bad := range []string{"x:i64[1]", "h:i64[<=4]", "h:i64[1,1,1,1,1,1,1,1]"} {
		_, err := tensor.ParseSignature([]string{"x:i64[1]"}, []string{"y:i64[1]"}, bad)
		must.Fail(t, bad, err, status.ErrInvalid)
	}
}

func TestOneGoroutineAtATimeUsesASequence(t *testing.T) {
	r := newRing(t, summing(t))
	q, w := begin(t, r.dial(), 2), r.taker(2)
	answer := make(chan error, 1)
	go func() { answer <- step(t, q, []int64{1, 2}, 1, 2) }()
	b, err := w.Next(soon(t))
	must.Do(t, err)
	_, state := q.State(soon(t), "sum")
	_, copied := q.Copy(soon(t))
	_, request := q.Request(soon(t))
	for _, err := range []error{step(t, q, []int64{1, 1}), state, copied, request, q.Reset(), q.Close()} {
		must.Fail(t, "in two goroutines", err, status.ErrNotDone)
	}
	q.Undo() // not the other's step
	must.Do(t, sum(soon(t), b))
	must.Do(t, b.Complete())
	must.Do(t, <-answer)
	s, err := q.State(soon(t), "sum")
	must.Do(t, err)
	if !slices.Equal(s.Data, append(binary(1), binary(2)...)) {
		t.Errorf("the state is %v", s.Data)
	}
}

func TestAClaimThatSequencesLeaveNoRoomForIsRefusedAtOnce(t *testing.T) {
	r := newRing(t, summing(t))
	c := r.dial(client.WithWindow(2))
	one := begin(t, c, 1)
	held, err := c.Claim(soon(t), 1)
	must.Do(t, err)
	waiting, opened := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := c.Claim(context.Background(), 1)
		waiting <- err
	}()
	go func() {
		_, err := c.Sequence(soon(t), 1)
		opened <- err
	}()
	_, err = c.Claim(context.Background(), 2) // never beside the first sequence
	must.Fail(t, "two rows", err, status.ErrRows)
	must.Do(t, held.Release())
	if err := <-waiting; err == nil { // it was faster: the sequence waits
		must.Do(t, one.Close())
	} else {
		must.Fail(t, "the last slot is a sequence's", err, status.ErrRows)
	}
	must.Do(t, <-opened)
}
