// SPDX-License-Identifier: Apache-2.0

package ringbatchtest_test

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

var signature = tensor.Signature{
	Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{4}}},
	Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{4}}},
}

func double(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		x, y := worker.Row[float32](b.Input(0), i), worker.Row[float32](b.Output(0), i)
		for j := range x {
			y[j] = 2 * x[j]
		}
	}
	return nil
}

// docs/testing.md and the Go tutorial show this test.
func TestDouble(t *testing.T) {
	b := ringbatchtest.Start(t, broker.Config{})
	b.Serve(t, worker.Config{Model: "double", Signature: signature}, double)
	model := b.Dial(t, "double")
	outs, err := model.Infer(t.Context(), []float32{1, 2, 3, 4})
	if err != nil {
		t.Fatal(err)
	}
	if y, _ := tensor.As[float32](outs[0]); !slices.Equal(y, []float32{2, 4, 6, 8}) {
		t.Error(y)
	}
}

func TestAProgramThatRetriesSurvivesARestartAndNothingIsLeft(t *testing.T) {
	var socket string
	t.Run("inner", func(t *testing.T) {
		b := ringbatchtest.Start(t, broker.Config{})
		socket = b.Socket()
		b.Serve(t, worker.Config{Model: "double", Signature: signature}, double)
		model := b.Dial(t, "double", client.WithRetry(time.Minute))
		if err := b.Stop(); err != nil {
			t.Fatal(err)
		}
		if err := b.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := model.Infer(t.Context(), []float32{1, 2, 3, 4}); err != nil {
			t.Error(err)
		}
	})
	if _, err := os.Stat(socket); !os.IsNotExist(err) {
		t.Errorf("the socket: %v", err)
	}
}
