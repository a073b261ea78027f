// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"errors"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// lone is a model of a gateway that serves nobody.
func lone(t testing.TB) *core.Model {
	g, err := core.New(core.Config{MaxMessageBytes: 1 << 20})
	must.Do(t, err)
	sig, err := tensor.ParseSignature([]string{"x:f32[2]", "v:i16[<=3]"}, []string{"y:f32[2]"})
	must.Do(t, err)
	return core.NewModel(g, &admin.Model{Name: "m", Signature: sig})
}

// readAll reads a checked call's sources as run would, into memory of its own.
func readAll(c *core.Call) ([][]byte, error) {
	all := make([][]byte, len(c.Inputs))
	for i := range c.Inputs {
		in := &c.Inputs[i]
		size := in.DType.Size()
		for _, d := range in.Shape {
			size *= d
		}
		all[i] = make([]byte, size)
		if err := in.Src.ReadFull(all[i]); err != nil {
			return nil, err
		}
	}
	return all, c.FinishSources()
}

// named makes sure that an error is one that a caller can be told.
func named(t *testing.T, err error) {
	var r *core.Refusal
	var code status.Code
	if err != nil && !errors.As(err, &r) && !errors.As(err, &code) {
		t.Errorf("an error without a meaning: %v", err)
	}
}

func rpcInput(name, datatype string, shape ...int64) *oip.ModelInferRequest_InferInputTensor {
	return &oip.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: shape}
}
