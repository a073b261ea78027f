// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// asks is the policy of most models here, and what more there is to ask for.
func asks(more ...policy.Setting) policy.Policy {
	return policy.New(more...).Over(policy.New(policy.MaxBatchSize(8), policy.WaitTime(time.Millisecond), policy.Slots(32),
		policy.MaxWindow(32)))
}

func expect(t *testing.T, what string, got error, want ...error) {
	t.Helper()
	for _, w := range want {
		if !errors.Is(got, w) {
			t.Errorf("%s: %v, expected %v", what, got, w)
		}
	}
}

func TestDialNamesWhatIsWrong(t *testing.T) {
	r := newRing(t, plain(t))
	dial := func(model string, opts ...client.Option) error {
		c, err := client.Dial(soon(t), model, append([]client.Option{client.WithSocket(r.socket)}, opts...)...)
		if err == nil {
			c.Close()
		}
		return err
	}
	expect(t, "no broker", dial("m", client.WithSocket(r.socket+"x")), status.ErrNoBroker)
	expect(t, "unknown model", dial("n"), status.ErrUnknownModel)
	expect(t, "fewer slots than none", dial("m", client.WithWindow(-1)), status.ErrInvalid)
	expect(t, "too many slots", dial("m", client.WithWindow(33)), status.ErrRingFull)
	expect(t, "all slots", dial("m", client.WithWindow(32)), nil)

	var err error
	// until the broker says so in time
	for limit := 100 * time.Millisecond; limit < patience && !errors.Is(err, status.ErrUnknownModel); limit *= 2 {
		short, cancel := context.WithTimeout(context.Background(), limit)
		_, err = client.Dial(short, "n", client.WithSocket(r.socket), client.WaitForModel())
		cancel()
	}
	expect(t, "a model that never comes", err, status.ErrUnknownModel, context.DeadlineExceeded)
}

func TestAnotherLayoutVersionIsNamed(t *testing.T) {
	r := newRing(t, plain(t))
	tamper := func(at int, with byte) error {
		s, err := attach.Open(soon(t), r.socket, &control.Request{Op: control.OpWorker, Model: "m", Worker: &control.WorkerInfo{
			Inputs: tensor.SpecTexts(r.model.Signature.Inputs), Outputs: tensor.SpecTexts(r.model.Signature.Outputs), Depth: 1}})
		must.Do(t, err)
		defer s.Close()
		b := s.BoardSeg.Bytes()
		was := b[at]
		b[at] += with
		defer func() { b[at] = was }()
		c, err := client.Dial(soon(t), "m", client.WithSocket(r.socket))
		if err == nil {
			c.Close()
		}
		return err
	}
	expect(t, "version", tamper(8, 1), status.ErrVersion)
	expect(t, "geometry", tamper(32, 1), status.ErrLayout)
	expect(t, "magic", tamper(0, 1), status.ErrLayout)
	expect(t, "nothing", tamper(0, 0), nil)
}

// The error for a peer of another version names the side to update.
func TestAnotherControlVersionIsNamedOnBothSides(t *testing.T) {
	r := newRing(t, plain(t))
	serves := fmt.Sprintf("the broker serves control versions %d to %d, this program speaks ", control.Oldest, control.Version)
	for _, x := range []struct {
		version int
		says    string
	}{
		{control.Oldest - 1, fmt.Sprintf("%s%d; bring this program up to date", serves, control.Oldest-1)},
		{control.Version + 1, fmt.Sprintf("%s%d; bring the broker up to date", serves, control.Version+1)},
	} {
		c, err := attach.Dial(soon(t), r.socket)
		must.Do(t, err)
		defer c.Close()
		var rep control.Reply
		must.Do(t, control.Send(c, time.Now().Add(patience), &control.Request{Version: x.version, Op: control.OpPing}))
		if _, err := control.Receive(c, time.Now().Add(patience), &rep); err != nil || status.Code(rep.Code) != status.ErrVersion ||
			!strings.Contains(rep.Message, x.says) {
			t.Errorf("the broker says %v, %+v", err, rep)
		}
	}

	// A broker that answers in an older version.
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "old"))
	must.Do(t, err)
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = control.Send(c.(*net.UnixConn), time.Now().Add(patience),
				&control.Reply{Version: control.Version - 1})
			c.Close()
		}
	}()
	_, err = client.Dial(soon(t), "m", client.WithSocket(l.Addr().String()))
	expect(t, "an old broker", err, status.ErrVersion)
	if err == nil || !strings.Contains(err.Error(), "bring the broker up to date") {
		t.Error(err)
	}
}

func TestInferNamesWhatIsWrongWithItsArguments(t *testing.T) {
	m := plain(t)
	m.Signature = signature(t, []string{"x:f32[4]", "n:i32[]"}, []string{"y:f32[4]", "k:i64[2]"})
	r := newRing(t, m)
	r.work(func(_ context.Context, b *worker.Batch) error { testbed.Touch(b); return nil })
	c := r.dial(client.WithWindow(4))
	ctx := soon(t)
	f, i := make([]float32, 40), make([]int32, 10)
	for _, x := range []struct {
		what string
		want error
		in   []any
	}{
		{"right", nil, []any{f[:4], i[:1]}},
		{"two rows", nil, []any{f[:8], i[:2]}},
		{"an input too few", status.ErrInvalid, []any{f[:4]}},
		{"another type", status.ErrDType, []any{f[:4], f[:1]}},
		{"no tensor at all", status.ErrDType, []any{f[:4], "1"}},
		{"a broken row", status.ErrSize, []any{f[:5], i[:1]}},
		{"no rows", status.ErrSize, []any{f[:0], i[:0]}},
		{"rows that disagree", status.ErrRows, []any{f[:8], i[:1]}},
		{"more rows than the window", status.ErrRows, []any{f[:20], i[:5]}},
		{"more rows than a batch", status.ErrTooLarge, []any{f[:36], i[:9]}},
		{"another shape", status.ErrShape, []any{tensor.Of("x", f[:4], 1, 2, 2), i[:1]}},
		{"another name", status.ErrInvalid, []any{tensor.Of("z", f[:4], 1, 4), i[:1]}},
		{"too few bytes", status.ErrSize, []any{tensor.Of("x", f[:3], 1, 4), i[:1]}},
	} {
		_, err := c.Infer(ctx, x.in...)
		expect(t, x.what, err, x.want)
	}
}

// test/conformance holds the misuses that the C library has, too.
func TestEveryMisuseOfARequestIsNamed(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(double)
	c := r.dial(client.WithWindow(2))
	ctx := soon(t)
	req, err := c.Claim(ctx, 1)
	expect(t, "claim", err, nil)
	_, err = req.Timing()
	expect(t, "timing before the end", err, status.ErrNotDone)
	_, err = req.Input("y")
	expect(t, "no such input", err, status.ErrInvalid)
	expect(t, "commit", req.Commit(ctx), nil)
	expect(t, "wait", errors.Join(req.Wait(ctx), req.Wait(ctx)), nil)
	_, err = req.Output("x")
	expect(t, "no such output", err, status.ErrInvalid)
	expect(t, "release", req.Release(), nil)
	if _, err := req.Input("x"); !errors.Is(err, status.ErrReleased) || req.Rows() != 0 {
		t.Errorf("input after release: %v", err)
	}
	for what, err := range map[string]error{"commit": req.Commit(ctx), "poll": req.Poll(), "priority": req.SetPriority(0),
		"cost": req.SetCost(1)} {
		expect(t, what+" after release", err, status.ErrReleased)
	}
	var zero client.Request
	expect(t, "a request that never was", zero.Wait(ctx), status.ErrReleased)
	_, err = c.Claim(ctx, 1, 5)
	expect(t, "sizes for a model without variable dimensions", err, status.ErrShape)

	past, cancel := context.WithTimeout(ctx, -time.Second)
	defer cancel()
	late, err := c.Claim(ctx, 1)
	expect(t, "commit", errors.Join(err, late.Commit(past)), nil)
	expect(t, "a deadline in the past", late.Wait(ctx), status.ErrExpired, context.DeadlineExceeded)
	expect(t, "release", late.Release(), nil)

	both, err := c.Claim(ctx, 2)
	expect(t, "claim all", err, nil)
	short, end := context.WithTimeout(ctx, 20*time.Millisecond)
	defer end()
	_, err = c.Claim(short, 1)
	expect(t, "a window that stays full", err, status.ErrFull, context.DeadlineExceeded)
	_ = both.Release()

	expect(t, "close", errors.Join(c.Close(), c.Close()), nil)
	_, err = c.Claim(ctx, 1)
	expect(t, "claim from a closed client", err, status.ErrClosed)
	_, err = c.TryClaim(1)
	expect(t, "claim from a closed client", err, status.ErrClosed)
	_, err = c.Infer(ctx, make([]float32, 4))
	expect(t, "infer on a closed client", err, status.ErrClosed)
}

func TestFailuresCarryTheirReason(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(func(_ context.Context, b *worker.Batch) error {
		testbed.Touch(b)
		switch worker.Row[float32](b.Input(0), 0)[0] {
		case 1:
			return errors.New("no such thing")
		case 2:
			panic("oh dear")
		case 3:
			b.Fail(0, errors.New("only this one"))
		}
		return nil
	})
	c := r.dial(client.WithWindow(1)) // the same slot each time: no reason survives
	for _, x := range []struct {
		say  float32
		text string
	}{{1, "no such thing"}, {0, ""}, {2, "worker function panicked: oh dear"}, {3, "only this one"}, {0, ""}} {
		_, err := c.Infer(soon(t), []float32{x.say, 0, 0, 0})
		if x.text == "" {
			expect(t, "after a failure", err, nil)
		} else if expect(t, x.text, err, status.ErrFailed); err != nil && err.Error() != x.text {
			t.Errorf("reason %q, expected %q", err, x.text)
		}
	}
}

func TestAFullQueueAndALongWaitInItAreNamed(t *testing.T) {
	var first client.Request
	for limit := 50 * time.Millisecond; ; limit *= 2 {
		m := plain(t)
		m.Policy = asks(policy.MaxQueue(1).At(0), policy.DefaultTimeout(limit).At(0), policy.Priorities(2))
		c := newRing(t, m).dial() // no worker
		first = commitOne(t, c, 0)
		second := commitOne(t, c, 0)
		err := second.Wait(soon(t))
		if errors.Is(err, status.ErrQueueTimeout) && limit < patience {
			continue // it came when the first one's time was over
		}
		expect(t, "second", err, status.ErrQueueFull)
		expect(t, "first", first.Wait(soon(t)), status.ErrQueueTimeout)
		break
	}
	if t1, err := first.Timing(); err != nil || t1.Queue < 0 {
		t.Errorf("timing of a failed request: %+v, %v", t1, err)
	}
}

func commitOne(t *testing.T, c *client.Client, level int) client.Request {
	t.Helper()
	req, err := c.Claim(soon(t), 1)
	must.Do(t, err)
	must.Do(t, errors.Join(req.SetPriority(level), req.Commit(soon(t))))
	return req
}
