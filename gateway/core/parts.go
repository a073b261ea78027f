// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"io"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
)

// wantsParts asks for the answer in parts, where the caller does and the model can.
func (c *Call) wantsParts(r client.Request) bool {
	return c.OnPart != nil && len(c.regions) == 0 && r.SetParts(false) == nil
}

// passParts passes the parts of an answer on until its end. A caller cannot be told that a
// row began again, so that it fails (ErrRestarted).
func (c *Call) passParts(ctx context.Context, r client.Request) error {
	for {
		part, err := r.NextPart(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		k := indexOf(c.Model.Sig.Outputs, part.Name)
		for i := range c.Outputs {
			if c.Outputs[i].index != k {
				continue
			}
			o := &Output{Name: part.Name, index: k, DType: part.DType, Shape: append([]int{1}, part.Shape...),
				Parts: [][]byte{part.Data}, Size: len(part.Data)}
			if err := c.OnPart(o); err != nil {
				return err
			}
			c.Streamed = o
		}
	}
}

// Rest is the outputs of an ended call that OnPart did not get.
func (c *Call) Rest() []Output {
	var rest []Output
	for _, o := range c.Outputs {
		if c.Streamed == nil || o.index != c.Streamed.index {
			rest = append(rest, o)
		}
	}
	return rest
}

// ErrCallerGone ends a call whose caller does not take its parts.
var ErrCallerGone = status.ErrCanceled
