// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"math"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// formerly is a model of that name as it was known before: with these tensors,
// and with its lanes closed if it went.
func (r *rig) formerly(name string, size string, went bool) *core.Model {
	r.t.Helper()
	k := core.NewModel(r.g, &admin.Model{Name: name, Signature: signature(r.t, []string{"x:f32[" + size + "]"}, []string{"y:f32[" + size + "]"})})
	if went {
		k.Close()
	}
	r.t.Cleanup(k.Close)
	return k
}

// callOf is a checked call of a model: one row of ones.
func callOf(t *testing.T, k *core.Model) *core.Call {
	t.Helper()
	spec := &k.Sig.Inputs[0]
	c := core.NewCall()
	c.Model, c.Caller = k, &core.Caller{Use: &core.Usage{}}
	in := c.AddInput()
	in.Name, in.DType, in.Shape, in.Size = spec.Name, tensor.F32, append([]int{1}, spec.Shape...), spec.RowBytes()
	ones := make(core.BytesSource, 0, in.Size)
	for range in.Size / 4 {
		ones = binary.LittleEndian.AppendUint32(ones, math.Float32bits(1))
	}
	in.Src = &ones
	must.Do(t, c.Check())
	return c
}

// As when the broker was restarted while a request was on its way.
func TestACallFollowsAModelThatWentAndCameBack(t *testing.T) {
	r := doublingRig(t, nil)
	c := callOf(t, r.formerly("double", "4", true))
	defer c.Done()
	must.Do(t, c.Run(soon(t)))
	if o := &c.Outputs[0]; len(o.Parts) != 1 || len(o.Parts[0]) != 16 || math.Float32frombits(binary.LittleEndian.Uint32(o.Parts[0])) != 2 {
		t.Errorf("it was answered %v", o.Parts)
	}
}

// It would be cut to the new size, and answered.
func TestACallOfAModelThatHasOtherTensorsNowIsRefused(t *testing.T) {
	r := doublingRig(t, nil)
	for _, size := range []string{"2", "8"} {
		for _, went := range []bool{false, true} {
			c := callOf(t, r.formerly("double", size, went))
			if err := c.Run(soon(t)); !errors.Is(err, status.ErrSignatureMismatch) {
				t.Errorf("%s numbers instead of 4, went %t: %v", size, went, err)
			}
			c.Done()
		}
	}
	r.idle()
}

func TestACallOfAModelThatIsGoneIsToldSo(t *testing.T) {
	m := doubler(t)
	r := newRig(t, nil, m)
	c := callOf(t, r.formerly("gone", "4", true))
	defer c.Done()
	if err := c.Run(soon(t)); !errors.Is(err, status.ErrUnknownModel) {
		t.Error(err)
	}
}
