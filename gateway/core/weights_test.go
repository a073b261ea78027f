// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAnAnswerNamesTheVersionOfItsWeights(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	end := ringbatchtest.Serve(worker.Config{Model: "double", Signature: m.Signature, Socket: r.socket},
		func(ctx context.Context, b *worker.Batch) error {
			b.SetVersion(2)
			return double(ctx, b)
		})
	defer func() { must.Check(t, end()) }()
	r.served(goodBody)
	if a := r.infer("double", goodBody); a.Parameters["weights_version"] != 2.0 {
		t.Errorf("HTTP: %v", a.Parameters)
	}
	many := `{"inputs":[{"name":"x","shape":[9,4],"datatype":"FP32","data":[0` + strings.Repeat(",0", 35) + `]}]}`
	if a := r.infer("double", many); len(a.Outputs) != 1 || a.Outputs[0].Shape[0] != 9 || a.Parameters["weights_version"] != 2.0 {
		t.Errorf("more rows than a batch has: %v", a)
	}
	rep, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "double",
		Inputs:           []*oip.ModelInferRequest_InferInputTensor{{Name: "x", Datatype: "FP32", Shape: []int64{1, 4}}},
		RawInputContents: [][]byte{[]byte(strings.Repeat("\x00", 16))}})
	if err != nil || rep.Parameters["weights_version"].GetInt64Param() != 2 {
		t.Errorf("gRPC: %v %v", rep, err)
	}
}
