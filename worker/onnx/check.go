// SPDX-License-Identifier: Apache-2.0

package onnx

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"unsafe"

	ort "github.com/yalue/onnxruntime_go"

	"github.com/ringbatch/ringbatch/internal/half"
	"github.com/ringbatch/ringbatch/tensor"
)

const (
	checkedRows   = 3
	tolerance     = 0.001
	halfTolerance = 0.02
)

// check refuses a model whose rows have other results in a batch than alone. Without a
// tolerance, neighbours must not change a single bit of a row's results.
func (m *model) check(most float64) error {
	inputs := m.example(checkedRows)
	if most == 0 {
		if err := m.checkNeighbours(inputs); err != nil {
			return err
		}
		most = tolerance
		for _, n := range m.outputs {
			if n.spec.DType == tensor.F16 || n.spec.DType == tensor.BF16 {
				most = halfTolerance
			}
		}
	}
	together, err := m.tryRows(inputs, checkedRows)
	if err != nil {
		return err
	}
	for i := range checkedRows {
		row := make([][]byte, len(inputs))
		for k := range inputs {
			size := m.inputs[k].spec.RowBytes()
			row[k] = inputs[k][i*size : (i+1)*size]
		}
		alone, err := m.tryRows(row, 1)
		if err != nil {
			return err
		}
		for k := range alone {
			if d := difference(alone[k].DType, alone[k].Data, together[k].Row(i).Data); d > most {
				return fmt.Errorf("%w: in a batch of %d the rows give other results than alone, by %.2g of the largest number of output "+
					"%q (at most %g): rows of this model depend on one another, or chance is in it. Serve single rows "+
					"(--max-batch-size 1), allow more (--tolerance 0.05) or anything (--no-check)",
					ErrModel, checkedRows, d, m.outputs[k].name, most)
			}
		}
	}
	return nil
}

// tryRows runs rows. Its error is short and matches ErrModel.
func (m *model) tryRows(inputs [][]byte, rows int) ([]tensor.Tensor, error) {
	results, err := m.runAlone(inputs, rows)
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrModel, firstLine(err))
	}
	return results, nil
}

// checkNeighbours compares each row of a batch with the same row in a batch of copies. If
// two runs of the same batch differ, rows may differ by noise times as much.
func (m *model) checkNeighbours(inputs [][]byte) error {
	const noise = 4
	var runs [2][]tensor.Tensor
	for i := range runs {
		var err error
		if runs[i], err = m.tryRows(inputs, checkedRows); err != nil {
			return err
		}
	}
	for i := range checkedRows {
		copies := make([][]byte, len(inputs))
		for k, data := range inputs {
			size := m.inputs[k].spec.RowBytes()
			copies[k] = bytes.Repeat(data[i*size:(i+1)*size], checkedRows)
		}
		among, err := m.tryRows(copies, checkedRows)
		if err != nil {
			return err
		}
		for k := range among {
			first, second, copied := runs[0][k].Row(i), runs[1][k].Row(i), among[k].Row(i)
			if difference(first.DType, first.Data, copied.Data) > noise*difference(first.DType, first.Data, second.Data) {
				return fmt.Errorf("%w: in a batch of %d a row gives other results beside other rows in output %q: rows of this model "+
					"depend on one another. Serve single rows (--max-batch-size 1), allow a difference (--tolerance 0.05) or "+
					"anything (--no-check)",
					ErrModel, checkedRows, m.outputs[k].name)
			}
		}
	}
	return nil
}

// difference is the distance of two results, as a part of the largest number. Between
// different whole numbers it is infinite.
func difference(d tensor.DType, a, b []byte) float64 {
	largest, apart := 0.0, 0.0
	for i := 0; i < len(a); i += d.Size() {
		x, y := number(d, a[i:]), number(d, b[i:])
		if !math.IsInf(x, 0) && !math.IsNaN(x) {
			largest = max(largest, math.Abs(x))
		}
		if x == y || math.IsNaN(x) && math.IsNaN(y) {
			continue
		}
		if !fraction(d) || math.IsNaN(x-y) {
			return math.Inf(1)
		}
		apart = max(apart, math.Abs(x-y))
	}
	if apart == 0 {
		return 0
	}
	return apart / largest // infinite where all of x is 0
}

func fraction(d tensor.DType) bool {
	return d == tensor.F16 || d == tensor.BF16 || d == tensor.F32 || d == tensor.F64
}

func number(d tensor.DType, at []byte) float64 {
	switch d {
	case tensor.F16, tensor.BF16:
		return float64(half.Float32(d, binary.NativeEndian.Uint16(at)))
	case tensor.F32:
		return float64(math.Float32frombits(binary.NativeEndian.Uint32(at)))
	case tensor.F64:
		return math.Float64frombits(binary.NativeEndian.Uint64(at))
	case tensor.I64:
		return float64(int64(binary.NativeEndian.Uint64(at)))
	case tensor.I32:
		return float64(int32(binary.NativeEndian.Uint32(at)))
	case tensor.I16:
		return float64(int16(binary.NativeEndian.Uint16(at)))
	case tensor.I8:
		return float64(int8(at[0]))
	}
	return float64(at[0]) // u8, bool
}

// example makes rows to try the model with: fractions around zero, and for whole numbers,
// which may be indices, zeros and ones.
func (m *model) example(rows int) [][]byte {
	random := rand.New(rand.NewPCG(1, 2))
	inputs := make([][]byte, len(m.inputs))
	for k, n := range m.inputs {
		d, size := n.spec.DType, n.spec.DType.Size()
		data := make([]byte, rows*n.spec.RowBytes())
		for i := 0; i < len(data); i += size {
			switch d {
			case tensor.F16, tensor.BF16:
				bits, _ := half.Bits(d, float32(random.NormFloat64()))
				binary.NativeEndian.PutUint16(data[i:], bits)
			case tensor.F32:
				binary.NativeEndian.PutUint32(data[i:], math.Float32bits(float32(random.NormFloat64())))
			case tensor.F64:
				binary.NativeEndian.PutUint64(data[i:], math.Float64bits(random.NormFloat64()))
			default:
				data[i] = byte(random.IntN(2)) // little-endian, as every machine that ringbatch runs on
			}
		}
		inputs[k] = data
	}
	return inputs
}

// bytesOf copies an output that ONNX Runtime allocated.
func bytesOf(v ort.Value) ([]byte, error) {
	switch t := v.(type) {
	case *ort.Tensor[float32]:
		return raw(t.GetData()), nil
	case *ort.Tensor[float64]:
		return raw(t.GetData()), nil
	case *ort.Tensor[int64]:
		return raw(t.GetData()), nil
	case *ort.Tensor[int32]:
		return raw(t.GetData()), nil
	case *ort.Tensor[int16]:
		return raw(t.GetData()), nil
	case *ort.Tensor[int8]:
		return raw(t.GetData()), nil
	case *ort.Tensor[uint8]:
		return raw(t.GetData()), nil
	case *ort.Tensor[bool]:
		return raw(t.GetData()), nil
	case *ort.CustomDataTensor:
		return append([]byte{}, t.GetData()...), nil
	}
	return nil, fmt.Errorf("ONNX Runtime gave a %T", v)
}

func raw[T any](data []T) []byte {
	if len(data) == 0 {
		return nil
	}
	var one T
	return append([]byte{}, unsafe.Slice((*byte)(unsafe.Pointer(&data[0])), len(data)*int(unsafe.Sizeof(one)))...)
}
