// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/weights"
)

func TestAnAnswerNamesTheVersionOfItsWeights(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	opts := []weights.Option{weights.WithSocket(r.socket), weights.WithMemory(r.mem)}
	p, err := weights.NewPublisher(soon(t), "double", []tensor.Spec{{Name: "w", DType: tensor.F32, Shape: []int{1}}}, opts...)
	must.Do(t, err)
	defer p.Close()
	for range 2 {
		b, err := p.Begin(soon(t))
		must.Do(t, err)
		_, err = p.Publish(b)
		must.Do(t, err)
	}
	f, err := weights.Follow(soon(t), "double", func(weights.View) error { return nil }, opts...)
	must.Do(t, err)
	defer f.Close()
	end := testbed.ServeLocal(worker.Config{Model: "double", Signature: m.Signature, Socket: r.socket, Memory: r.mem, Weights: f}, double)
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
