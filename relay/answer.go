// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/relaywire"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"google.golang.org/protobuf/proto"
)

// answer is a ModelInferResponse as the transport received it.
type answer struct {
	data mem.BufferSlice
	meta oip.ModelInferResponse // all but the raw contents
	raw  []rawContents
}

type rawContents struct{ at, size int }

// free gives the transport's buffers back.
func (a *answer) free() {
	a.data.Free()
	a.data = nil
}

var errAnswer = errors.New("the answer is no ModelInferResponse")

const (
	rawField     = 6
	maxMetaBytes = 1 << 20 // of an answer, without its tensors
)

// split finds the raw contents, and reads the rest.
func (a *answer) split() error {
	total := a.data.Len()
	r := a.data.Reader()
	defer r.Close()
	var meta []byte
	for r.Remaining() > 0 {
		tag, err := binary.ReadUvarint(r)
		if err != nil {
			return errAnswer
		}
		field, kind := protowire.DecodeTag(tag)
		switch kind {
		case protowire.BytesType:
			n, err := binary.ReadUvarint(r)
			if err != nil || n > uint64(r.Remaining()) {
				return errAnswer
			}
			if field == rawField {
				if len(a.raw) >= tensor.MaxTensors {
					return errAnswer
				}
				a.raw = append(a.raw, rawContents{total - r.Remaining(), int(n)})
				if _, err := r.Discard(int(n)); err != nil {
					return errAnswer
				}
				continue
			}
			if len(meta)+int(n) > maxMetaBytes {
				return fmt.Errorf("%w: more than %d bytes beside its tensors", errAnswer, maxMetaBytes)
			}
			meta = protowire.AppendVarint(protowire.AppendTag(meta, field, kind), n)
			at := len(meta)
			meta = append(meta, make([]byte, n)...)
			if _, err := io.ReadFull(r, meta[at:]); err != nil {
				return errAnswer
			}
		case protowire.VarintType:
			if _, err := binary.ReadUvarint(r); err != nil {
				return errAnswer
			}
		default:
			return errAnswer
		}
	}
	if proto.Unmarshal(meta, &a.meta) != nil {
		return errAnswer
	}
	return nil
}

// failure is a request that failed alone.
type failure struct{ name, text string }

// write puts the tensors into the slots of the requests, and tells which of
// them have none because they failed. Nothing is written where the answer is not
// what was asked for.
func (a *answer) write(b *worker.Batch, requests []int) (failed map[int]failure, err error) {
	if err := a.split(); err != nil {
		return nil, err
	}
	failed = map[int]failure{}
	wrong := error(nil)
	if p := a.meta.Parameters[relaywire.Failed]; p != nil {
		err := relaywire.ParseFailed(p.GetStringParam(), func(i int, name, text string) {
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
	if len(a.raw) != len(a.meta.Outputs) {
		return nil, fmt.Errorf("%w: %d outputs, and raw contents of %d", errAnswer, len(a.meta.Outputs), len(a.raw))
	}
	sent := 0 // rows; a gateway counts those of failed requests, too
	for _, i := range requests {
		sent += b.Request(i).Rows
	}
	places, err := a.find(b.Layout().Signature.Outputs, sent)
	if err != nil {
		return nil, err
	}
	sizes, err := a.sizes(b, rows, places)
	if err != nil {
		return nil, err
	}
	for k, at := range places {
		if err := a.writeOutput(b, rows, k, a.raw[at], sizes); err != nil {
			return nil, err
		}
	}
	return failed, nil
}

// find tells where each of the model's outputs is in the answer, once and of the
// right type and shape.
func (a *answer) find(specs []tensor.Spec, rows int) (places []int, err error) {
	for k := range specs {
		at := -1
		for i, o := range a.meta.Outputs {
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
		if err := checkOutput(&specs[k], a.meta.Outputs[at], rows); err != nil {
			return nil, err
		}
		places = append(places, at)
	}
	return places, nil
}

// checkOutput compares type and shape with the model's. As many bytes may come
// in another shape, whose numbers would be wrong.
func checkOutput(spec *tensor.Spec, o *oip.ModelInferResponse_InferOutputTensor, rows int) error {
	if d, ok := dtypes[o.Datatype]; !ok || d != spec.DType {
		return fmt.Errorf("%w: output %q is of type %s, want %s", errAnswer, o.Name, o.Datatype, spec.DType)
	}
	fits := len(o.Shape) == 1+len(spec.Shape) && o.Shape[0] == int64(rows)
	for d := 0; fits && d < len(spec.Shape); d++ {
		fits = o.Shape[d+1] == int64(spec.Shape[d]) || slices.Contains(spec.Variable, d)
	}
	if !fits {
		return fmt.Errorf("%w: output %q has shape %v, want %s of %d rows", errAnswer, o.Name, o.Shape, spec, rows)
	}
	return nil
}

// sizes are those of variable outputs, row by row; nil if there are none.
func (a *answer) sizes(b *worker.Batch, rows, places []int) ([][]int, error) {
	sig := &b.Layout().Signature
	n := tensor.VariableDims(sig.Outputs)
	if n == 0 || len(rows) == 0 {
		return nil, nil
	}
	all := make([][]int, 0, len(rows))
	if p := a.meta.Parameters[relaywire.Sizes]; p != nil {
		if err := relaywire.ParseSizes(p.GetStringParam(), n, func(dims []int) error {
			all = append(all, slices.Clone(dims))
			return nil
		}); err != nil {
			return nil, err
		}
	} else { // another server: all rows have the shape that it tells
		var dims []int
		for k, at := range places {
			for _, v := range sig.Outputs[k].Variable {
				dims = append(dims, int(a.meta.Outputs[at].Shape[v+1]))
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
func (a *answer) writeOutput(b *worker.Batch, rows []int, k int, raw rawContents, sizes [][]int) error {
	sig := &b.Layout().Signature
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
	want := 0
	for i := range rows {
		want += rowBytes(i)
	}
	if want != raw.size {
		return fmt.Errorf("%w: output %q has %d bytes for %d rows, want %d", errAnswer, spec.Name, raw.size, len(rows), want)
	}
	r := a.data.Reader()
	defer r.Close()
	if _, err := r.Discard(raw.at); err != nil {
		return errAnswer
	}
	for i, row := range rows {
		if _, err := io.ReadFull(r, col.Bytes(row)[:rowBytes(i)]); err != nil {
			return errAnswer
		}
	}
	return nil
}
