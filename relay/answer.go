// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

type answer struct{ oip.Response }

var errAnswer = errors.New("the answer is no ModelInferResponse")

type failure struct{ name, text string }

// write copies the tensors into the slots of the requests, and returns the
// requests that failed. An answer that does not fit the requests writes nothing.
func (a *answer) write(b *worker.Batch, requests []int) (failed map[int]failure, err error) {
	if err := a.Split(); err != nil {
		return nil, fmt.Errorf("%w: %w", errAnswer, err)
	}
	failed = map[int]failure{}
	wrong := error(nil)
	if p := a.Meta.Parameters[oip.FailedParameter]; p != nil {
		err := oip.ParseFailed(p.GetStringParam(), func(i int, name, text string) {
			if i >= len(requests) {
				wrong = fmt.Errorf("%w: it says that request %d of %d failed", errAnswer, i, len(requests))
				return
			}
			failed[requests[i]] = failure{name, text}
		})
		if err = errors.Join(err, wrong); err != nil {
			return nil, err
		}
	}
	rows := make([]int, 0, b.Rows()) // of the batch, in the order of the answer
	for _, i := range requests {
		if _, no := failed[i]; !no {
			q := b.Request(i)
			for row := q.Row; row < q.Row+q.Rows; row++ {
				rows = append(rows, row)
			}
		}
	}
	if len(a.Raw) != len(a.Meta.Outputs) {
		return nil, fmt.Errorf("%w: %d outputs, and raw contents of %d", errAnswer, len(a.Meta.Outputs), len(a.Raw))
	}
	sent := 0 // rows; a gateway counts failed requests as well
	for _, i := range requests {
		sent += b.Request(i).Rows
	}
	places, err := a.find(b.Signature().Outputs, sent)
	if err != nil {
		return nil, err
	}
	sizes, err := a.sizes(b, rows, places)
	if err != nil {
		return nil, err
	}
	for k, at := range places {
		if err := writeOutput(b, rows, k, &a.Raw[at], sizes); err != nil {
			return nil, err
		}
	}
	return failed, nil
}

// find returns the place of each of the model's outputs in the answer. Each has to
// be there once, with its type and shape.
func (a *answer) find(specs []tensor.Spec, rows int) (places []int, err error) {
	for k := range specs {
		at := -1
		for i, o := range a.Meta.Outputs {
			switch {
			case o.Name != specs[k].Name:
			case at >= 0:
				return nil, fmt.Errorf("%w: output %q is there twice", errAnswer, o.Name)
			default:
				at = i
			}
		}
		if at < 0 {
			return nil, fmt.Errorf("%w: output %q is missing", errAnswer, specs[k].Name)
		}
		if err := checkOutput(&specs[k], a.Meta.Outputs[at], rows); err != nil {
			return nil, err
		}
		places = append(places, at)
	}
	return places, nil
}

// checkOutput compares type and shape with the model's: another shape may have as
// many bytes, in another order.
func checkOutput(spec *tensor.Spec, o *oip.ModelInferResponse_InferOutputTensor, rows int) error {
	if d, err := oip.ParseType(o.Datatype); err != nil || d != spec.DType {
		return fmt.Errorf("%w: output %q is of type %s, want %s", errAnswer, o.Name, o.Datatype, spec.DType)
	}
	row := oip.WireRow(spec, spec.Shape)
	fits := len(o.Shape) == 1+len(row) && o.Shape[0] == int64(rows)
	for d := 0; fits && d < len(row); d++ {
		fits = o.Shape[d+1] == int64(spec.Shape[d]) || slices.Contains(spec.Variable, d)
	}
	if !fits {
		return fmt.Errorf("%w: output %q has shape %v, want %s of %d rows", errAnswer, o.Name, o.Shape, spec, rows)
	}
	return nil
}

// sizes returns the sizes of variable outputs of each row; nil without variable ones.
func (a *answer) sizes(b *worker.Batch, rows, places []int) ([][]int, error) {
	sig := b.Signature()
	n := tensor.VariableDims(sig.Outputs)
	if n == 0 || len(rows) == 0 {
		return nil, nil
	}
	all := make([][]int, 0, len(rows))
	if p := a.Meta.Parameters[oip.SizesParameter]; p != nil {
		if err := oip.ParseSizes(p.GetStringParam(), n, func(dims []int) error {
			all = append(all, slices.Clone(dims))
			return nil
		}); err != nil {
			return nil, err
		}
	} else { // another server: all rows have one shape
		var dims []int
		for k, at := range places {
			for _, v := range sig.Outputs[k].Variable {
				dims = append(dims, int(a.Meta.Outputs[at].Shape[v+1]))
			}
		}
		for range rows {
			all = append(all, dims)
		}
	}
	if len(all) != len(rows) {
		return nil, fmt.Errorf("%w: sizes of %d rows, want %d", errAnswer, len(all), len(rows))
	}
	for i, row := range rows {
		if err := b.SetRowDims(row, all[i]...); err != nil {
			return nil, fmt.Errorf("%w: %w", errAnswer, err)
		}
	}
	return all, nil
}

// writeOutput copies one output into the slots.
func writeOutput(b *worker.Batch, rows []int, k int, raw *oip.Spans, sizes [][]int) error {
	sig := b.Signature()
	spec, col := &sig.Outputs[k], b.Output(k)
	first := tensor.VariableDims(sig.Outputs[:k])
	rowBytes := func(i int) int {
		if len(spec.Variable) == 0 {
			return col.RowBytes()
		}
		n, v := spec.DType.Size(), 0
		for d, most := range spec.Shape {
			if v < len(spec.Variable) && spec.Variable[v] == d {
				most = sizes[i][first+v]
				v++
			}
			n *= most
		}
		return n
	}
	if spec.DType == tensor.Str {
		left := raw.Size()
		src := oip.TextSource{Src: raw, Spec: spec, Left: &left}
		for _, row := range rows {
			if err := src.ReadFull(col.Bytes(row)); err != nil {
				return fmt.Errorf("%w: %w", errAnswer, err)
			}
		}
		if left > 0 {
			return fmt.Errorf("%w: output %q has %d bytes behind its last text", errAnswer, spec.Name, left)
		}
		return nil
	}
	want := 0
	for i := range rows {
		want += rowBytes(i)
	}
	if want != raw.Size() {
		return fmt.Errorf("%w: output %q has %d bytes for %d rows, want %d", errAnswer, spec.Name, raw.Size(), len(rows), want)
	}
	for i, row := range rows {
		if raw.ReadFull(col.Bytes(row)[:rowBytes(i)]) != nil {
			return errAnswer
		}
	}
	return nil
}
