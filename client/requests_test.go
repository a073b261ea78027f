// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func TestVariableSizesArePaddedToTheirBucketAndKnownToTheWorker(t *testing.T) {
	m := broker.ModelConfig{
		Signature: signature(t, []string{"x:i32[<=8,2]", "k:u8[<=4]"}, []string{"y:i64[<=8]", "z:i32[]"}), Policy: asks(),
	}
	m.Policy = asks(policy.Buckets("x", 0, 4, 8))
	r := newRing(t, m)
	// y[i] = sum of row i of x, as many as x has; z = rows of zeros it was padded with.
	r.work(func(_ context.Context, b *worker.Batch) error {
		for q := range b.Len() {
			req, shape := b.Request(q), b.InputShape(q, 0)
			col := b.Input(0).RowShape()
			if !slices.Equal(b.InputShape(q, 1), []int{int(req.Dims()[1])}) || int(req.Dims()[0]) != shape[0] {
				return fmt.Errorf("sizes %v, shapes %v and %v", req.Dims(), shape, b.InputShape(q, 1))
			}
			for row := req.Row; row < req.Row+req.Rows; row++ {
				x, y := worker.Row[int32](b.Input(0), row), worker.Row[int64](b.Output(0), row)
				for i := range col[0] {
					y[i] = int64(x[2*i]) + int64(x[2*i+1])
					if i >= shape[0] && y[i] != 0 {
						return fmt.Errorf("padding is %d", y[i])
					}
				}
				worker.Row[int32](b.Output(1), row)[0] = int32(col[0] - shape[0])
			}
			if err := b.SetOutputDims(q, shape[0]); err != nil {
				return err
			}
		}
		return nil
	})
	c := r.dial(client.WithWindow(2)) // few slots: old bytes would show in the padding
	var wg sync.WaitGroup
	for n := 1; n <= 8; n++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for rows := 1; rows <= 2; rows++ {
				x := make([]int32, rows*n*2)
				for i := range x {
					x[i] = int32(n*1000 + i)
				}
				k := make([]uint8, rows*(1+n%4))
				outs, err := c.Infer(soon(t), tensor.Of("x", x, rows, n, 2), tensor.Of("k", k, rows, 1+n%4))
				if err != nil {
					t.Errorf("%d: %v", n, err)
					return
				}
				y, _ := tensor.As[int64](outs[0])
				z, _ := tensor.As[int32](outs[1])
				if !slices.Equal(outs[0].Shape, []int{rows, n}) || len(y) != rows*n {
					t.Errorf("%d: output of shape %v", n, outs[0].Shape)
					return
				}
				for i := range y {
					if want := int64(x[2*i]) + int64(x[2*i+1]); y[i] != want {
						t.Errorf("%d: element %d is %d, not %d", n, i, y[i], want)
					}
				}
				if pad := map[bool]int{true: 4 - n, false: 8 - n}[n <= 4]; int(z[0]) != pad {
					t.Errorf("%d: padded with %d rows, not %d", n, z[0], pad)
				}
			}
		}()
	}
	wg.Wait()
	_, err := c.Infer(soon(t), tensor.Of("x", make([]int32, 18), 1, 9, 2), tensor.Of("k", make([]uint8, 1), 1, 1))
	expect(t, "larger than the maximum", err, status.ErrShape)
	_, err = c.Claim(soon(t), 1, 3)
	expect(t, "a size too few", err, status.ErrShape)
}

func TestARequestOfSeveralRowsStaysTogether(t *testing.T) {
	m := plain(t)
	m.Policy = asks(policy.WaitTime(5 * time.Millisecond))
	r := newRing(t, m)
	r.work(func(ctx context.Context, b *worker.Batch) error {
		rows := 0
		for q := range b.Len() {
			if req := b.Request(q); req.Row != rows {
				return fmt.Errorf("request %d begins at row %d, not %d", q, req.Row, rows)
			}
			rows += b.Request(q).Rows
		}
		if rows != b.Rows() || rows > 8 {
			return fmt.Errorf("%d rows in a batch of %d", rows, b.Rows())
		}
		return double(ctx, b)
	})
	c := r.dial(client.WithWindow(20))
	var wg sync.WaitGroup
	for g := range 12 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for k := range 30 {
				rows := 1 + (g+k)%8
				x := make([]float32, 4*rows)
				for i := range x {
					x[i] = float32(g*10_000 + k*100 + i)
				}
				outs, err := c.Infer(soon(t), x)
				if err != nil {
					t.Error(err)
					return
				}
				y, _ := tensor.As[float32](outs[0])
				for i := range x {
					if y[i] != 2*x[i] {
						t.Errorf("element %d is %v, not %v", i, y[i], 2*x[i])
						return
					}
				}
			}
		}()
	}
	wg.Wait()
}

func TestTimingAddsUp(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(func(ctx context.Context, b *worker.Batch) error {
		time.Sleep(20 * time.Millisecond)
		return double(ctx, b)
	})
	c := r.dial(client.WithTiming())
	for range 5 {
		start := time.Now()
		req, err := c.Claim(soon(t), 1)
		must.Do(t, err)
		time.Sleep(5 * time.Millisecond)
		expect(t, "commit", req.Commit(soon(t)), nil)
		expect(t, "wait", req.Wait(soon(t)), nil)
		took := time.Since(start)
		tm, err := req.Timing()
		must.Do(t, err)
		total := tm.Claim + tm.Write + tm.Queue + tm.Dispatch + tm.Compute + tm.Wake
		if tm.Compute < 20*time.Millisecond || tm.Write < 5*time.Millisecond || total > took+5*time.Millisecond ||
			total < 25*time.Millisecond {
			t.Errorf("%v in all, of which %+v", took, tm)
		}
		for _, d := range []time.Duration{tm.Claim, tm.Queue, tm.Dispatch, tm.Wake} {
			if d < 0 {
				t.Errorf("a negative time: %+v", tm)
			}
		}
		expect(t, "release", req.Release(), nil)
	}
}

func TestTimingCountsWithoutAWait(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(func(context.Context, *worker.Batch) error {
		time.Sleep(20 * time.Millisecond)
		return fmt.Errorf("refused")
	})
	req, err := r.dial().Claim(soon(t), 1)
	must.Do(t, err)
	expect(t, "commit", req.Commit(soon(t)), nil)
	for err = req.Poll(); errors.Is(err, status.ErrNotDone); err = req.Poll() {
		time.Sleep(time.Millisecond)
	}
	expect(t, "poll", err, status.ErrFailed)
	if tm, err := req.Timing(); err != nil || tm.Queue < 20*time.Millisecond {
		t.Errorf("%+v, %v", tm, err)
	}
}

func TestViewsOutliveTheBrokerAndTheClientUntilTheyAreReleased(t *testing.T) {
	r := newRing(t, plain(t))
	leave := r.work(double)
	c := r.dial()
	req, err := c.Claim(soon(t), 1)
	must.Do(t, err)
	x, _ := req.Input("x")
	in, _ := tensor.As[float32](x)
	copy(in, []float32{1, 2, 3, 4})
	expect(t, "commit", req.Commit(soon(t)), nil)
	expect(t, "wait", req.Wait(soon(t)), nil)
	leave()
	r.stop()
	r.start()
	c.Close()
	y, err := req.Output("y")
	expect(t, "output", err, nil)
	if out, _ := tensor.As[float32](y); !slices.Equal(out, []float32{2, 4, 6, 8}) {
		t.Errorf("the view says %v", out)
	}
	expect(t, "release", req.Release(), nil)
	expect(t, "release", req.Release(), status.ErrReleased)
}
