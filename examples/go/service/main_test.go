// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func TestTheHandlerAnswersAndSaysWhoseFaultAnErrorIs(t *testing.T) {
	row := []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{2}}}
	b := ringbatchtest.Start(t, broker.Config{})
	b.Serve(t, worker.Config{Model: "affine", Signature: tensor.Signature{Inputs: row, Outputs: row}},
		func(_ context.Context, batch *worker.Batch) error {
			for i := range batch.Rows() {
				x, y := worker.Row[float32](batch.Input(0), i), worker.Row[float32](batch.Output(0), i)
				if x[0] < 0 {
					return errors.New("negative")
				}
				y[0], y[1] = 2*x[0]+1, 2*x[1]+1
			}
			return nil
		})
	handle := handler(b.Dial(t, "affine"))
	for body, want := range map[string]int{"[1,2]": 200, "[1]": 400, "none": 400, "[-1,2]": 500} {
		w := httptest.NewRecorder()
		handle(w, httptest.NewRequest("POST", "/", strings.NewReader(body)))
		if w.Code != want {
			t.Errorf("%s was answered with %d %s, not %d", body, w.Code, w.Body, want)
		}
	}
}
