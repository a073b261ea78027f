// SPDX-License-Identifier: Apache-2.0

package cpu

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

func TestWhatWasPaddedToABucketComesBackInItsOwnShape(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	b := testbed.StartOnHeap(t, broker.Config{})
	socket, ended := b.Socket(), make(chan error, 3)
	inputs := []tensor.Spec{
		{Name: "x", DType: tensor.I32, Shape: []int{4, 4, 2}, Variable: []int{0, 1}},
		{Name: "k", DType: tensor.I64, Shape: []int{8}, Variable: []int{0}},
	}
	for _, name := range []string{"echo", "affine"} {
		m, err := New(name, Options{Inputs: inputs, Scale: 1})
		must.Do(t, err)
		cfg := worker.Config{Model: name, Signature: m.Signature, Socket: socket}
		cfg.Policy = policy.New(policy.Slots(64), policy.Buckets("x", 0, 2, 4), policy.Buckets("x", 1, 4), policy.Buckets("k", 0, 8))
		go func() { ended <- worker.Serve(ctx, cfg, m.Run) }()
	}
	for _, name := range []string{"echo", "affine"} {
		c, err := client.Dial(ctx, name, client.WithSocket(socket), client.WaitForModel())
		must.Do(t, err)
		for n := 1; n <= 4; n++ {
			x, k := make([]int32, 2*n*(5-n)*2), make([]int64, 2*n)
			for i := range x {
				x[i] = int32(i + 1)
			}
			for i := range k {
				k[i] = int64(-i - 1)
			}
			outs, err := c.Infer(ctx, tensor.Of("x", x, 2, n, 5-n, 2), tensor.Of("k", k, 2, n))
			if err != nil {
				t.Fatal(name, err)
			}
			if y, _ := tensor.As[int32](outs[0]); !slices.Equal(y, x) {
				t.Errorf("%s: %v of shape %v, not %v", name, y, outs[0].Shape, x)
			}
			if y, _ := tensor.As[int64](outs[1]); !slices.Equal(y, k) {
				t.Errorf("%s: %v of shape %v, not %v", name, y, outs[1].Shape, k)
			}
		}
		c.Close()
	}
	cancel()
	ended <- b.Close()
	for range 3 {
		must.Check(t, <-ended)
	}
}
