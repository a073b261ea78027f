// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// found writes, for each row, the elements of x that are not zero.
func found(_ context.Context, b *worker.Batch) error {
	for row := range b.Rows() {
		y, n := worker.Row[int32](b.Output(0), row), 0
		for _, v := range worker.Row[int32](b.Input(0), row) {
			if v != 0 {
				y[n] = v
				n++
			}
		}
		if err := b.SetRowDims(row, -1); !errors.Is(err, status.ErrShape) {
			return fmt.Errorf("a size below 0: %w", err)
		}
		if err := b.SetRowDims(row, n); err != nil {
			return err
		}
	}
	return nil
}

func TestEachRowOfARequestHasItsOwnOutputSize(t *testing.T) {
	m := broker.ModelConfig{Signature: signature(t, []string{"x:i32[4]"}, []string{"y:i32[<=4]"}), Policy: asks()}
	r := newRing(t, m)
	r.work(found)
	c := r.dial()
	rows := [][]int32{{0, 7, 0, 8}, {0, 0, 0, 0}, {1, 2, 3, 4}}
	req, err := c.Fill(soon(t), slices.Concat(rows...))
	must.Do(t, err)
	defer req.Release()
	must.Do(t, req.Commit(soon(t)))
	must.Do(t, req.Wait(soon(t)))
	if _, err := req.Output("y"); !errors.Is(err, status.ErrShape) {
		t.Errorf("rows of different sizes have a common view: %v", err)
	}
	for i, x := range rows {
		row, err := req.OutputRow("y", i)
		must.Do(t, err)
		y, err := tensor.As[int32](row)
		want := slices.DeleteFunc(slices.Clone(x), func(v int32) bool { return v == 0 })
		if err != nil || !slices.Equal(row.Shape, []int{1, len(want)}) || !slices.Equal(y, want) {
			t.Errorf("row %d is %v of shape %v, %v", i, y, row.Shape, err)
		}
	}
	if _, err := req.OutputRow("y", 3); !errors.Is(err, status.ErrRows) {
		t.Errorf("row 3 of 3: %v", err)
	}
}

func TestRequestsOfDifferentSizesShareARaggedBatch(t *testing.T) {
	m := broker.ModelConfig{Signature: signature(t, []string{"x:i32[<=8]", "k:u8[<=2,2]"}, []string{"y:i32[<=8]"}),
		Policy: asks(policy.Slots(64), policy.Ragged(true), policy.WaitTime(patience))}
	// A batch goes out when it is full: all sizes are in one.
	r := newRing(t, m)
	if _, err := worker.Attach(soon(t), worker.Config{Model: "m", Signature: m.Signature, Socket: r.socket}); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("a worker that did not ask for ragged batches: %v", err)
	}
	sizes := make(chan int, 8)
	r.workAs(worker.Config{Policy: policy.New(policy.Ragged(true))}, func(ctx context.Context, b *worker.Batch) error {
		for i := range b.Len() {
			q := b.Request(i)
			if n := len(worker.Row[int32](b.Input(0), q.Row)); n != b.InputShape(i, 0)[0] || n != int(q.Dims()[0]) {
				return fmt.Errorf("a row of %d, its shape is %v", n, b.InputShape(i, 0))
			}
			if n := len(b.Input(1).Bytes(q.Row)); n != 2*b.InputShape(i, 1)[0] {
				return fmt.Errorf("a row of %d bytes, its shape is %v", n, b.InputShape(i, 1))
			}
		}
		if !slices.Equal(b.Dims()[:2], []uint32{7, 2}) {
			return fmt.Errorf("the largest sizes are %v", b.Dims())
		}
		if _, whole := b.Input(0).Contiguous(); whole {
			return errors.New("rows of different sizes are one tensor")
		}
		sizes <- b.Len()
		return found(ctx, b)
	})
	idle := r.dial() // could always join, so that only full batches go out
	defer idle.Close()
	c := r.dial(client.WithWindow(8))
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			x := make([]int32, n)
			for i := range x {
				x[i] = int32(100*n + i + 1)
			}
			outs, err := c.Infer(soon(t), tensor.Of("x", x, 1, n), tensor.Of("k", make([]uint8, n%3*2), 1, n%3, 2))
			if err != nil {
				t.Error(err)
				return
			}
			if y, _ := tensor.As[int32](outs[0]); !slices.Equal(y, x) {
				t.Errorf("%v came back as %v", x, y)
			}
		}()
	}
	wg.Wait()
	if n := <-sizes; n != 8 {
		t.Errorf("a batch of %d, not of all 8", n)
	}
}

func TestWindowsThatAreLeftOpenFitTheRing(t *testing.T) {
	m := plain(t)
	m.Policy = asks(policy.Slots(64))
	r := newRing(t, m)
	r.work(double)
	first := r.dial()
	if n := first.Model().Window; n != 8 {
		t.Errorf("the first client has a window of %d, not 8", n)
	}
	clients := []*client.Client{first}
	for len(clients) < 24 { // eight windows of 8 would have been all
		clients = append(clients, r.dial())
	}
	for _, c := range clients {
		if _, err := c.Infer(soon(t), []float32{1, 2, 3, 4}); err != nil {
			t.Fatal(err)
		}
	}
	for {
		c, err := client.Dial(soon(t), "m", client.WithSocket(r.socket))
		if err != nil {
			if !errors.Is(err, status.ErrRingFull) || !strings.Contains(err.Error(), "raise the model's slots") {
				t.Errorf("a full ring: %v", err)
			}
			return
		}
		defer c.Close()
	}
}

func TestAWindowThatIsAskedForIsGivenWholeOrRefusedWithWhatHelps(t *testing.T) {
	m := plain(t)
	m.Policy = asks(policy.Slots(64))
	r := newRing(t, m)
	for range 8 {
		if n := r.dial(client.WithWindow(7)).Model().Window; n != 7 {
			t.Errorf("a window of %d, not 7", n)
		}
	}
	_, err := client.Dial(soon(t), "m", client.WithSocket(r.socket), client.WithWindow(9))
	if !errors.Is(err, status.ErrRingFull) || !strings.Contains(err.Error(), "smaller window") {
		t.Errorf("9 where 8 are free: %v", err)
	}
}
