package gateway

import (
	"encoding/binary"
	"math"
	"strconv"

	"github.com/ringbatch/ringbatch/internal/half"
	"github.com/ringbatch/ringbatch/tensor"
)

// numbers is an input whose elements are written in JSON, flat or nested: they
// are read straight into the slot.
type numbers struct {
	scanner
	dtype tensor.DType
	depth int
	comma bool // an element or a list has just ended
}

// next gives the next element's word; nil at the end, or after an error.
func (n *numbers) next() []byte {
	for n.err == nil {
		switch n.peek() {
		case '[':
			if n.comma {
				n.fail("expected ','")
				return nil
			}
			n.at++
			n.depth++
		case ']':
			n.at++
			n.depth--
			n.comma = true
		case ',':
			n.at++
			n.comma = false
		case 0:
			return nil
		default:
			n.comma = true
			return n.word()
		}
	}
	return nil
}

func (n *numbers) readFull(p []byte) error {
	size := n.dtype.Size()
	for ; len(p) > 0; p = p[size:] {
		w := n.next()
		if n.err != nil {
			return n.err
		}
		if w == nil {
			return badRequest("data has fewer elements than the shape needs")
		}
		if !putNumber(p, n.dtype, w) {
			return badRequest("data has an element %q, which is no %s", w[:min(len(w), 32)], TypeName(n.dtype))
		}
	}
	return nil
}

func (n *numbers) finish() error {
	if w := n.next(); n.err == nil && w != nil {
		return badRequest("data has more elements than the shape takes")
	}
	return n.err
}

// putNumber writes one element.
func putNumber(p []byte, d tensor.DType, w []byte) bool {
	switch d {
	case tensor.Bool:
		switch string(w) {
		case "true", "1":
			p[0] = 1
		case "false", "0":
			p[0] = 0
		default:
			return false
		}
		return true
	case tensor.F16, tensor.BF16, tensor.F32:
		v, err := strconv.ParseFloat(string(w), 32)
		if err != nil || !isNumber(w) {
			return false
		}
		if d == tensor.F32 {
			binary.LittleEndian.PutUint32(p, math.Float32bits(float32(v)))
			return true
		}
		bits, err := half.Bits(d, float32(v))
		binary.LittleEndian.PutUint16(p, bits)
		return err == nil
	case tensor.F64:
		v, err := strconv.ParseFloat(string(w), 64)
		binary.LittleEndian.PutUint64(p, math.Float64bits(v))
		return err == nil && isNumber(w)
	}
	v, ok := parseInt(w)
	if !ok {
		return false
	}
	switch d {
	case tensor.U8:
		p[0] = uint8(v)
		return v >= 0 && v <= math.MaxUint8
	case tensor.I8:
		p[0] = uint8(v)
		return v == int64(int8(v))
	case tensor.I16:
		binary.LittleEndian.PutUint16(p, uint16(v))
		return v == int64(int16(v))
	case tensor.I32:
		binary.LittleEndian.PutUint32(p, uint32(v))
		return v == int64(int32(v))
	case tensor.I64:
		binary.LittleEndian.PutUint64(p, uint64(v))
		return true
	}
	return false
}

// appendNumber writes one element as JSON; what JSON has no number for is null.
func appendNumber(b []byte, d tensor.DType, p []byte) []byte {
	switch d {
	case tensor.Bool:
		return strconv.AppendBool(b, p[0] != 0)
	case tensor.U8:
		return strconv.AppendUint(b, uint64(p[0]), 10)
	case tensor.I8:
		return strconv.AppendInt(b, int64(int8(p[0])), 10)
	case tensor.I16:
		return strconv.AppendInt(b, int64(int16(binary.LittleEndian.Uint16(p))), 10)
	case tensor.I32:
		return strconv.AppendInt(b, int64(int32(binary.LittleEndian.Uint32(p))), 10)
	case tensor.I64:
		return strconv.AppendInt(b, int64(binary.LittleEndian.Uint64(p)), 10)
	}
	bits, v := 32, 0.0
	switch d {
	case tensor.F32:
		v = float64(math.Float32frombits(binary.LittleEndian.Uint32(p)))
	case tensor.F64:
		bits, v = 64, math.Float64frombits(binary.LittleEndian.Uint64(p))
	default:
		v = float64(half.Float32(d, binary.LittleEndian.Uint16(p)))
	}
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return append(b, "null"...)
	}
	form := byte('f')
	if abs := math.Abs(v); abs != 0 && (abs < 1e-6 || abs >= 1e21) {
		form = 'e'
	}
	return strconv.AppendFloat(b, v, form, -1, bits)
}
