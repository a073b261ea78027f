// SPDX-License-Identifier: Apache-2.0

// Package gatecall checks what the gateway's doors make of requests, without a broker.
package gatecall

import (
	"errors"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Lone returns a model of a gateway without a broker.
func Lone(t testing.TB) *core.Model {
	g, err := core.New(core.Config{MaxMessageBytes: 1 << 20})
	must.Do(t, err)
	sig, err := tensor.ParseSignature([]string{"x:f32[2]", "v:i16[<=3]"}, []string{"y:f32[2]"})
	must.Do(t, err)
	return core.NewModel(g, &admin.Model{Name: "m", Signature: sig})
}

// ReadAll reads a checked call's sources.
func ReadAll(c *core.Call) ([][]byte, error) {
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
	for i := range c.Inputs {
		if s, ok := c.Inputs[i].Src.(interface{ Finish() error }); ok {
			if err := s.Finish(); err != nil {
				return nil, err
			}
		}
	}
	return all, nil
}

// Named fails the test for an error without a meaning.
func Named(t *testing.T, err error) {
	var r *core.Refusal
	var code status.Code
	if err != nil && !errors.As(err, &r) && !errors.As(err, &code) {
		t.Errorf("an error without a meaning: %v", err)
	}
}
