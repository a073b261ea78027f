// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/status"
)

// lone is a model of a gateway that serves nobody.
func lone(t testing.TB) *model {
	g, err := newCore(Config{MaxMessageBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	return newModel(g, &admin.Model{Name: "m", Signature: signature(t, []string{"x:f32[2]", "v:i16[<=3]"}, []string{"y:f32[2]"})})
}

// readAll reads a checked call's sources as run would, into memory of its own.
func readAll(c *call) ([][]byte, error) {
	all := make([][]byte, len(c.inputs))
	for i := range c.inputs {
		in := &c.inputs[i]
		size := in.dtype.Size()
		for _, d := range in.shape {
			size *= d
		}
		all[i] = make([]byte, size)
		if err := in.src.ReadFull(all[i]); err != nil {
			return nil, err
		}
	}
	return all, c.finishSources()
}

// named makes sure that an error is one that a caller can be told.
func named(t *testing.T, err error) {
	var r *refusal
	var code status.Code
	if err != nil && !errors.As(err, &r) && !errors.As(err, &code) {
		t.Errorf("an error without a meaning: %v", err)
	}
}
