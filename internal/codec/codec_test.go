// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

var dtypes = []tensor.DType{tensor.Bool, tensor.U8, tensor.I8, tensor.I16, tensor.I32, tensor.I64, tensor.F16, tensor.BF16, tensor.F32,
	tensor.F64, tensor.F8E4M3FN, tensor.F8E5M2}

// elements are n random ones of a dtype, every bit pattern as likely.
func elements(d tensor.DType, n int, rng *rand.Rand) []byte {
	p := make([]byte, n*d.Size())
	for i := range p {
		p[i] = byte(rng.Uint32())
		if d == tensor.Bool {
			p[i] &= 1
		}
	}
	return p
}

// same compares elements; one NaN is as good as another.
func same(d tensor.DType, x, y []byte) bool {
	return string(AppendJSON(nil, d, x, false)) == string(AppendJSON(nil, d, y, false)) && len(x) == len(y)
}

func TestElementsAreReadAsTheyWereWritten(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, d := range dtypes {
		for range 200 {
			const rows, columns = 3, 7
			want := elements(d, rows*columns, rng)
			text := append(AppendJSON([]byte("["), d, want, false), ']')
			if !json.Valid(text) {
				t.Fatalf("%s: not JSON: %s", d, text)
			}
			if most := rows*columns*MaxJSONBytes(d) + 2; len(text) > most {
				t.Errorf("%s: %d bytes, at most %d were promised: %s", d, len(text), most, text)
			}
			nested := []byte("[ ")
			row := len(want) / rows
			for i := range rows {
				if i > 0 {
					nested = append(nested, " ,\n"...)
				}
				nested = append(AppendJSON(append(nested, '['), d, want[i*row:(i+1)*row], false), " ]"...)
			}
			nested = append(nested, "]"...)
			for _, text := range [][]byte{text, nested} {
				got := make([]byte, len(want))
				r := NewReader(append(text, ", something else"...), d, []int{rows, columns})
				for i := range rows { // as into three slots
					if err := r.Fill(got[i*row : (i+1)*row]); err != nil {
						t.Fatalf("%s: %v in %s", d, err, text)
					}
				}
				if n, err := r.End(); err != nil || n != len(text) {
					t.Fatalf("%s: ended at %d of %d: %v", d, n, len(text), err)
				}
				if !same(d, got, want) {
					t.Errorf("%s: %x became %x", d, want, got)
				}
			}
		}
	}
}

func TestWhatIsNoTensorOfThatShapeIsRefused(t *testing.T) {
	for _, c := range []struct {
		text  string
		dtype tensor.DType
		shape []int
		want  error
	}{
		{"[1,2,3]", tensor.I32, []int{1, 4}, status.ErrSize},
		{"[1,2,3,4,5]", tensor.I32, []int{1, 4}, status.ErrSize},
		{"[[1,2],[3,4,5]]", tensor.I32, []int{2, 2}, status.ErrSize},
		{"[[1,2,3],[4]]", tensor.I32, []int{2, 2}, status.ErrShape},
		{"[[1,2],3,4]", tensor.I32, []int{2, 2}, status.ErrShape},
		{"[1,2,[3,4]]", tensor.I32, []int{2, 2}, status.ErrInvalid},
		{"[[[1,2]],[[3,4]]]", tensor.I32, []int{2, 2}, status.ErrInvalid},
		{"[1,2,3", tensor.I32, []int{1, 3}, status.ErrInvalid},
		{"[1,2,3,]", tensor.I32, []int{1, 3}, status.ErrInvalid},
		{"[,1]", tensor.I32, []int{1, 1}, status.ErrInvalid},
		{"[1 2]", tensor.I32, []int{1, 2}, status.ErrInvalid},
		{"[1}", tensor.I32, []int{1, 1}, status.ErrInvalid},
		{"1", tensor.I32, []int{1, 1}, status.ErrInvalid},
		{"{}", tensor.I32, []int{1, 1}, status.ErrInvalid},
		{"", tensor.I32, []int{1, 1}, status.ErrInvalid},
		{"[1.0]", tensor.I32, []int{1, 1}, status.ErrDType},
		{"[1e2]", tensor.I32, []int{1, 1}, status.ErrDType},
		{"[01]", tensor.I32, []int{1, 1}, status.ErrDType},
		{"[+1]", tensor.I32, []int{1, 1}, status.ErrDType},
		{"[2147483648]", tensor.I32, []int{1, 1}, status.ErrDType},
		{"[-129]", tensor.I8, []int{1, 1}, status.ErrDType},
		{"[256]", tensor.U8, []int{1, 1}, status.ErrDType},
		{"[-1]", tensor.U8, []int{1, 1}, status.ErrDType},
		{"[9223372036854775808]", tensor.I64, []int{1, 1}, status.ErrDType},
		{"[99999999999999999999999999]", tensor.I64, []int{1, 1}, status.ErrDType},
		{"[1e39]", tensor.F32, []int{1, 1}, status.ErrDType},
		{"[65520]", tensor.F16, []int{1, 1}, status.ErrDType},
		{"[1e309]", tensor.F64, []int{1, 1}, status.ErrDType},
		{"[0x1p3]", tensor.F64, []int{1, 1}, status.ErrDType},
		{"[1_000]", tensor.F64, []int{1, 1}, status.ErrDType},
		{"[.5]", tensor.F64, []int{1, 1}, status.ErrDType},
		{"[inf]", tensor.F64, []int{1, 1}, status.ErrDType},
		{"[null]", tensor.F32, []int{1, 1}, status.ErrDType},
		{`["1"]`, tensor.F32, []int{1, 1}, status.ErrDType},
		{`["NaN"]`, tensor.I32, []int{1, 1}, status.ErrDType},
		{`["NaN`, tensor.F32, []int{1, 1}, status.ErrInvalid},
		{"[true]", tensor.I32, []int{1, 1}, status.ErrDType},
		{"[2]", tensor.Bool, []int{1, 1}, status.ErrDType},
		{"[1.0]", tensor.Bool, []int{1, 1}, status.ErrDType},
	} {
		p := make([]byte, product(c.shape)*c.dtype.Size())
		r := NewReader([]byte(c.text), c.dtype, c.shape)
		err := r.Fill(p)
		if err == nil {
			_, err = r.End()
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s as %s%v: %v", c.text, c.dtype, c.shape, err)
		}
	}
}

func product(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

func TestEmptyListsAreTensorsWithoutElements(t *testing.T) {
	for _, text := range []string{"[]", " [ ] ", "[[],[]]", "[ [ ] ,[]]"} {
		r := NewReader([]byte(text), tensor.F32, []int{2, 0})
		if err := r.Fill(nil); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if _, err := r.End(); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestNumbersThatAreNone(t *testing.T) {
	for _, d := range []tensor.DType{tensor.F16, tensor.BF16, tensor.F32, tensor.F64, tensor.F8E5M2} {
		p := make([]byte, 6*d.Size())
		r := NewReader([]byte(`[NaN,"NaN",Infinity,"Infinity",-Infinity,"-Infinity"]`), d, []int{1, 6})
		if err := r.Fill(p); err != nil {
			t.Fatalf("%s: %v", d, err)
		}
		if got := string(AppendJSON(nil, d, p, false)); got != `"NaN","NaN","Infinity","Infinity","-Infinity","-Infinity"` {
			t.Errorf("%s: %s", d, got)
		}
		if got := string(AppendJSON(nil, d, p, true)); got != strings.Repeat(",null", 6)[1:] {
			t.Errorf("%s: %s", d, got)
		}
	}
}

func TestTypedNumbers(t *testing.T) {
	var p [8]byte
	for _, c := range []struct {
		text string
		d    tensor.DType
		want string
	}{
		{"+7", tensor.I16, "7"}, {"-7", tensor.I64, "-7"}, {"-9223372036854775808", tensor.I64, "-9223372036854775808"},
		{"0x1p-2", tensor.F32, "0.25"}, {"inf", tensor.F16, "Infinity"}, {"1e-7", tensor.F64, "1e-07"}, {"1e21", tensor.F32, "1e+21"},
		{"1", tensor.Bool, "true"}, {"false", tensor.Bool, "false"}, {"-0", tensor.F32, "-0"},
	} {
		if err := Put(p[:], c.d, []byte(c.text)); err != nil {
			t.Errorf("%s: %v", c.text, err)
		} else if got := string(Append(nil, c.d, p[:])); got != c.want {
			t.Errorf("%s as %s: %s", c.text, c.d, got)
		}
	}
	if err := Put(p[:], tensor.F8E4M3FN, []byte("inf")); !errors.Is(err, status.ErrDType) {
		t.Errorf("infinity as f8e4m3fn: %v", err)
	}
	err := Put(p[:], tensor.F32, []byte(strings.Repeat("x", 1<<20)))
	if !errors.Is(err, status.ErrDType) || len(err.Error()) > 200 {
		t.Errorf("a long word: %.300v", err)
	}
}

func TestReadingAndWritingAllocateNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, d := range dtypes {
		data := elements(d, 64, rng)
		text := append(AppendJSON([]byte("["), d, data, false), ']')
		shape := []int{1, 64}
		room := make([]byte, 0, 64*MaxJSONBytes(d))
		n := testing.AllocsPerRun(10, func() {
			r := NewReader(text, d, shape)
			if r.Fill(data) != nil {
				t.Error("not read")
			}
			AppendJSON(room, d, data, true)
		})
		if n > 1 { // the Reader itself, where it is not on the stack
			t.Errorf("%s: %v allocations", d, n)
		}
	}
}

func TestNPYFilesMayLeaveTheRowDimensionOut(t *testing.T) {
	spec := tensor.Spec{Name: "x", DType: tensor.BF16, Shape: []int{3}}
	for _, shape := range [][]int{{1, 3}, {3}} {
		var file bytes.Buffer
		in := tensor.Tensor{Name: "x", DType: tensor.BF16, Shape: shape, Data: []byte{1, 2, 3, 4, 5, 6}}
		must.Do(t, WriteNPY(&file, in))
		got, err := ReadNPY(&file, &spec, 1<<20)
		if err != nil || got.DType != tensor.BF16 || !slices.Equal(got.Shape, []int{1, 3}) || !bytes.Equal(got.Data, in.Data) {
			t.Errorf("%v: %+v, %v", shape, got, err)
		}
	}
}

// A Reader reads the same values as encoding/json.
func FuzzReader(f *testing.F) {
	for _, text := range []string{"[1,2,3,4]", "[[1,2],[3,4]]", "[[1,2],[3]]", "[1e2,-0.5,3,4]", `["NaN",2,3,Infinity]`, "[[],[]]",
		"[true,false,0,1]", "[1,2,3,4", "[[[1]]]", "[,]", " [ [ 1 , 2 ] , [ 3 , 4 ] ] x"} {
		for i := range dtypes {
			f.Add([]byte(text), byte(i), byte(2))
		}
	}
	f.Fuzz(func(t *testing.T, text []byte, dtype, columns byte) {
		d := dtypes[int(dtype)%len(dtypes)]
		shape := []int{2, int(columns % 5)}
		p := make([]byte, product(shape)*d.Size())
		r := NewReader(text, d, shape)
		err := r.Fill(p)
		n := 0
		if err == nil {
			n, err = r.End()
		}
		if err != nil {
			var code status.Code
			if !errors.As(err, &code) {
				t.Errorf("an error without a name: %v", err)
			}
			return
		}
		if isFloat(d) {
			text = bytes.ReplaceAll(bytes.ReplaceAll(text[:n:n], []byte(`"`), nil), []byte("NaN"), []byte("0"))
			text = bytes.ReplaceAll(text, []byte("Infinity"), []byte("0"))
			n = len(text)
		}
		var any any
		if err := json.Unmarshal(text[:n], &any); err != nil {
			t.Errorf("%q was taken: %v", text[:n], err)
		}
	})
}

// What AppendJSON writes is JSON, within its bound, and reads back.
func FuzzAppendJSON(f *testing.F) {
	f.Add(byte(0), []byte{0, 1})
	f.Add(byte(9), le64(math.MaxFloat64, -math.SmallestNonzeroFloat64, 1.7976931348623157e-6, math.Inf(1)))
	f.Fuzz(func(t *testing.T, dtype byte, data []byte) {
		d := dtypes[int(dtype)%len(dtypes)]
		data = data[:len(data)/d.Size()*d.Size()]
		if d == tensor.Bool {
			for i := range data {
				data[i] &= 1
			}
		}
		text := append(AppendJSON([]byte("["), d, data, false), ']')
		if !json.Valid(text) || len(text) > len(data)/d.Size()*MaxJSONBytes(d)+2 {
			t.Errorf("%s %x: %s", d, data, text)
		}
		got := make([]byte, len(data))
		r := NewReader(text, d, []int{1, len(data) / d.Size()})
		if err := r.Fill(got); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if _, err := r.End(); err != nil || !same(d, got, data) {
			t.Errorf("%s: %x became %x, %v", text, data, got, err)
		}
	})
}

func le64(v ...float64) []byte {
	var b []byte
	for _, x := range v {
		b = le.AppendUint64(b, math.Float64bits(x))
	}
	return b
}
