// SPDX-License-Identifier: Apache-2.0

package client

import (
	"context"
	"errors"
	"fmt"
	"runtime"

	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Infer returns copies of all outputs, in signature order. An input is a tensor.Tensor
// or, for fixed shapes, a slice of whole rows; text is a string or a []string.
func (c *Client) Infer(ctx context.Context, inputs ...any) ([]tensor.Tensor, error) {
	var outs []tensor.Tensor
	err := c.run(ctx, inputs, func(r Request) (err error) {
		outs, err = r.copyOutputs()
		return err
	})
	return outs, err
}

// copyOutputs copies all outputs of a request that ended well.
func (r Request) copyOutputs() (outs []tensor.Tensor, err error) {
	for _, spec := range r.link.info.Signature.Outputs {
		view, err := r.Output(spec.Name)
		if err != nil {
			return nil, err
		}
		out := tensor.Tensor{Name: view.Name, DType: view.DType, Shape: view.Shape}
		out.Data = make([]byte, view.Rows()*view.RowBytes())
		if err := tensor.Copy(out, view); err != nil {
			return nil, err
		}
		outs = append(outs, out)
	}
	return outs, nil
}

// run sends a request, with retries, and reads its outputs in place.
func (c *Client) run(ctx context.Context, inputs []any, read func(Request) error) error {
	return c.retrying(ctx, func(ctx context.Context) error { return c.once(ctx, inputs, read) })
}

func (c *Client) once(ctx context.Context, inputs []any, read func(Request) error) error {
	r, err := c.Fill(ctx, inputs...)
	if err != nil {
		return err
	}
	defer r.Release()
	if err := r.Commit(ctx); err != nil {
		return err
	}
	if err := r.Wait(ctx); err != nil {
		return err
	}
	return read(r)
}

// Fill claims a request for these inputs and writes them.
func (c *Client) Fill(ctx context.Context, inputs ...any) (Request, error) {
	for {
		r, moved, err := c.fill(ctx, &c.current().Signature, inputs)
		if !moved {
			return r, err
		}
		runtime.Gosched() // the inputs may fit the new signature
	}
}

// misfit explains err, arguments that do not fit sig: the signature may have changed
// since the client was dialled.
func (c *Client) misfit(sig *tensor.Signature, err error) error {
	if sig.Equal(c.dialed) {
		return err
	}
	return fmt.Errorf("%w (%v)", c.changed(sig), err)
}

// fill is Fill for a signature. moved reports that the model has another one now.
func (c *Client) fill(ctx context.Context, sig *tensor.Signature, inputs []any) (r Request, moved bool, err error) {
	tensors, rows, dims, err := c.checkInputs(sig, inputs)
	if err != nil {
		return Request{}, false, err
	}
	if r, err = c.claim(ctx, true, sig, rows, dims, nil); err != nil {
		return r, errors.Is(err, status.ErrSignatureMismatch), err
	}
	if err = r.write(sig, tensors); err != nil {
		_ = r.Release()
	}
	return r, false, err
}

// checkInputs checks the inputs of a request: how many rows they have, and the sizes of
// their variable dimensions.
func (c *Client) checkInputs(sig *tensor.Signature, inputs []any) (tensors []tensor.Tensor, rows int, dims []int, err error) {
	specs := sig.Inputs
	if len(inputs) != len(specs) {
		err := fmt.Errorf("%w: the model has %d inputs, %d were given", status.ErrInvalid, len(specs), len(inputs))
		return nil, 0, nil, c.misfit(sig, err)
	}
	tensors = make([]tensor.Tensor, len(inputs))
	var sizes []uint32
	for i := range inputs {
		t, err := tensorOf(&specs[i], inputs[i])
		var n int
		if err == nil {
			n, sizes, err = tensor.CheckInput(&specs[i], &t, sizes)
		}
		if err != nil {
			return nil, 0, nil, c.misfit(sig, err)
		}
		if i > 0 && n != rows {
			return nil, 0, nil, fmt.Errorf("%w: input %q has %d rows, %q has %d", status.ErrRows, specs[i].Name, n, specs[0].Name, rows)
		}
		rows, tensors[i] = n, t
	}
	dims = make([]int, len(sizes))
	for i, d := range sizes {
		dims[i] = int(d)
	}
	return tensors, rows, dims, nil
}

// write copies inputs that checkInputs has checked into the request's slots.
func (r Request) write(sig *tensor.Signature, tensors []tensor.Tensor) error {
	for i := range tensors {
		view, err := r.Input(sig.Inputs[i].Name)
		if err == nil {
			err = pad.Copy(view, tensors[i])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// tensorOf takes a Tensor, or makes one of a slice with rows of fixed shape.
func tensorOf(spec *tensor.Spec, v any) (tensor.Tensor, error) {
	switch v := v.(type) {
	case string:
		return spec.OfTexts([]string{v})
	case []string:
		return spec.OfTexts(v)
	}
	t, err := bufferOf(spec, v)
	_, whole := v.(tensor.Tensor)
	if spec.DType == tensor.Str && !whole {
		return t, fmt.Errorf("%w: %q is text, of at most %d bytes: want a string or a []string, got %T", status.ErrDType, spec.Name,
			spec.TextBytes(), v)
	}
	if whole || err != nil {
		return t, err
	}
	if len(spec.Variable) > 0 {
		return t, fmt.Errorf("%w: %q has variable dimensions; give its shape with tensor.Of", status.ErrShape, spec.Name)
	}
	n := spec.RowBytes()
	if len(t.Data) == 0 || len(t.Data)%n != 0 {
		return t, fmt.Errorf("%w: %q has rows of %d elements, got %d", status.ErrSize,
			spec.Name, spec.RowElems(), len(t.Data)/spec.DType.Size())
	}
	t.Shape = append([]int{len(t.Data) / n}, spec.Shape...)
	return t, nil
}

// bufferOf takes a Tensor, or makes one without a shape of a slice, and checks its type.
func bufferOf(spec *tensor.Spec, v any) (t tensor.Tensor, err error) {
	switch v := v.(type) {
	case tensor.Tensor:
		if v.Name != "" && v.Name != spec.Name {
			return v, fmt.Errorf("%w: tensor %q given where %q is expected", status.ErrInvalid, v.Name, spec.Name)
		}
		t = v
	case []bool:
		t = tensor.Of(spec.Name, v)
	case []uint8:
		t = tensor.Of(spec.Name, v)
	case []int8:
		t = tensor.Of(spec.Name, v)
	case []int16:
		t = tensor.Of(spec.Name, v)
	case []int32:
		t = tensor.Of(spec.Name, v)
	case []int64:
		t = tensor.Of(spec.Name, v)
	case []tensor.Float16:
		t = tensor.Of(spec.Name, v)
	case []tensor.BFloat16:
		t = tensor.Of(spec.Name, v)
	case []float32:
		t = tensor.Of(spec.Name, v)
	case []float64:
		t = tensor.Of(spec.Name, v)
	case []tensor.Float8E4M3FN:
		t = tensor.Of(spec.Name, v)
	case []tensor.Float8E5M2:
		t = tensor.Of(spec.Name, v)
	default:
		return t, fmt.Errorf("%w: %q wants a tensor.Tensor or a slice of %s, got %T", status.ErrDType, spec.Name, spec.DType, v)
	}
	if t.DType != spec.DType {
		return t, fmt.Errorf("%w: %q is %s, got %s", status.ErrDType, spec.Name, spec.DType, t.DType)
	}
	return t, nil
}
