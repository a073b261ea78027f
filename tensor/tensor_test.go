// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/status"
)

func TestASizeThatCannotBeSaysWhy(t *testing.T) {
	for text, why := range map[string]string{
		"x:f32[<=0]":          "at least 1",
		"x:f32[-1]":           "at least 1",
		"x:u8[99999999999]":   "larger than",
		"x:u8[300000,300000]": "larger than",
		"x:u8[<=5000000000]":  "at most 4294967295",
	} {
		if _, err := ParseSpec(text); !errors.Is(err, status.ErrInvalid) || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := ParseSpec("x:u8[5000000000]"); err != nil { // fixed
		t.Error(err)
	}
}

func TestATensorSaysWhereItLies(t *testing.T) {
	for text, want := range map[string]string{
		"x:f32[4]@device:0": "x:f32[4]@device:0", "x:f32[]@device": "x:f32[]@device:0", "x:f32[4]@host": "x:f32[4]",
		"a@b:f32[4]@device:63": "a@b:f32[4]@device:63", "x@device:0:f32[4]": "", "x:f32[4]@": "", "x:f32[4]@device:64": "",
		"x:f32[4]@device:-1": "", "x:f32[4]@device:": "", "x:f32[4]@gpu": "", "x:f32[<=4]@device:0": "", "x:f32[4]@device:0]": "",
		"x:f32@device:0": "",
	} {
		spec, err := ParseSpec(text)
		refused := errors.Is(err, status.ErrInvalid)
		same := err == nil && spec.String() == want && spec.OnDevice() == strings.Contains(want, "]@")
		if want == "" && !refused || want != "" && !same {
			t.Errorf("%s: %s, %v", text, spec, err)
		}
	}
	if spec, _ := ParseSpec("x:f32[4]@device:07"); spec.Device() != 7 {
		t.Errorf("device %d", spec.Device())
	}
	if _, err := ParseSignature([]string{"x:f32[4]@device:0"}, []string{"y:f32[4]@device:1"}); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("tensors on two GPUs: %v", err)
	}
	want := []string{"x:f32[4]@device:2", "y:f32[4]@host", "h", "t:str[<=4]"}
	if got := PlaceTexts([]string{"x:f32[4]", "y:f32[4]@host", "h", "t:str[<=4]"}, "device:2"); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestEveryDTypeIsReadAsItsGoType(t *testing.T) {
	check := func(d DType, name string, size int, got DType, elems int, err error) {
		t.Helper()
		parsed, perr := ParseDType(name)
		if got != d || d.String() != name || parsed != d || perr != nil || d.Size() != size || !d.Valid() {
			t.Errorf("%v: parsed %v (%v), size %d, type of elements %v", d, parsed, perr, d.Size(), got)
		}
		if err != nil || elems != 6 {
			t.Errorf("%v: %d elements, %v", d, elems, err)
		}
	}
	roundTrip[bool](check, Bool, "bool", 1)
	roundTrip[uint8](check, U8, "u8", 1)
	roundTrip[int8](check, I8, "i8", 1)
	roundTrip[int16](check, I16, "i16", 2)
	roundTrip[int32](check, I32, "i32", 4)
	roundTrip[int64](check, I64, "i64", 8)
	roundTrip[Float16](check, F16, "f16", 2)
	roundTrip[BFloat16](check, BF16, "bf16", 2)
	roundTrip[float32](check, F32, "f32", 4)
	roundTrip[float64](check, F64, "f64", 8)
	roundTrip[Float8E4M3FN](check, F8E4M3FN, "f8e4m3fn", 1)
	roundTrip[Float8E5M2](check, F8E5M2, "f8e5m2", 1)
	for _, name := range []string{"", "float", "F32", "f8", "complex64"} {
		if _, err := ParseDType(name); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("dtype %q: %v", name, err)
		}
	}
	if DType(0).Valid() || (F8E5M2 + 1).Valid() {
		t.Error("a dtype that is none counts as one")
	}
}

func roundTrip[T Element](check func(DType, string, int, DType, int, error), d DType, name string, size int) {
	tensor := Of("x", make([]T, 6), 2, 3)
	back, err := As[T](tensor)
	check(d, name, size, DTypeOf[T](), len(back), err)
}

func TestAsRefusesAnotherTypeAndRowsWithGaps(t *testing.T) {
	x := Of("x", make([]float32, 6), 2, 3)
	if _, err := As[int32](x); !errors.Is(err, status.ErrDType) {
		t.Errorf("f32 as i32: %v", err)
	}
	x.Stride = 8
	x.Shape = []int{3, 1}
	if _, err := As[float32](x); !errors.Is(err, status.ErrShape) {
		t.Errorf("rows with gaps: %v", err)
	}
	if row, err := As[float32](x.Row(2)); err != nil || len(row) != 1 {
		t.Errorf("one of them: %v, %v", row, err)
	}
	odd := Tensor{Name: "x", DType: F32, Shape: []int{1, 1}, Data: Of("", make([]float64, 2)).Data[1:5]}
	if _, err := As[float32](odd); !errors.Is(err, status.ErrSize) {
		t.Errorf("misaligned: %v", err)
	}
}

func TestAsRefusesAShapeThatItsBytesDoNotFill(t *testing.T) {
	for _, shape := range [][]int{{5}, {1, 5}, {-1, 1}} {
		if v, err := As[float32](Of("x", []float32{1, 2, 3, 4}, shape...)); !errors.Is(err, status.ErrSize) {
			t.Errorf("shape %v: %v, %v", shape, v, err)
		}
	}
}

func TestCheckInputNamesWhatIsWrong(t *testing.T) {
	fixed, _ := ParseSpec("x:f32[2,3]")
	variable, _ := ParseSpec("x:f32[<=2,3]")
	f := func(n int) []float32 { return make([]float32, n) }
	strided := Of("x", f(12), 2, 2, 3)
	strided.Stride = 32
	narrow := Of("x", f(12), 2, 2, 3)
	narrow.Stride = 8
	for _, c := range []struct {
		what string
		spec Spec
		in   Tensor
		want error
	}{
		{"one row", fixed, Of("x", f(6), 1, 2, 3), nil},
		{"another type", fixed, Of("x", make([]int32, 6), 1, 2, 3), status.ErrDType},
		{"a dimension less", fixed, Of("x", f(6), 2, 3), status.ErrShape},
		{"another size", fixed, Of("x", f(8), 1, 2, 4), status.ErrShape},
		{"no rows", fixed, Of("x", f(0), 0, 2, 3), status.ErrRows},
		{"fewer bytes", fixed, Of("x", f(5), 1, 2, 3), status.ErrSize},
		{"more bytes", fixed, Of("x", f(7), 1, 2, 3), status.ErrSize},
		{"smaller than the maximum", variable, Of("x", f(3), 1, 1, 3), nil},
		{"larger than the maximum", variable, Of("x", f(9), 1, 3, 3), status.ErrShape},
		{"of no size", variable, Of("x", f(0), 1, 0, 3), nil},
		{"rows further apart than there are bytes", fixed, strided, status.ErrSize},
		{"rows that overlap", fixed, narrow, status.ErrSize},
	} {
		rows, _, err := CheckInput(&c.spec, &c.in, nil)
		if !errors.Is(err, c.want) || err == nil && rows != 1 {
			t.Errorf("%s: %d rows, %v", c.what, rows, err)
		}
	}
}

func TestASpecIsReadAsItIsWritten(t *testing.T) {
	for _, text := range []string{"x:f32[3,224,224]", "tokens:i32[<=512]", "y:f64[]", "a.b/c:bool[<=1,2,<=3]", "ü:u8[1]", "t:str[<=256]",
		"t:str[2,<=8]", "m:f32[0,4]", "x:f8e4m3fn[2]", "x:f8e5m2[]"} {
		spec, err := ParseSpec(text)
		if err != nil || spec.String() != text {
			t.Errorf("%s became %v, %v", text, spec, err)
		}
	}
	for _, text := range []string{
		"", "x", "x:f32", "x:f32[", "x:f32]", ":f32[1]", "x:f33[1]", "x:f32[-1]", "x:f32[<=0]", "x:f32[1,]", "x:f32[,]",
		"x:f32[0,99999999999]", "t:str[<=0]", "t:str[0,<=8]", "x:f32[a]", "t:str[]", "t:str[8]", "t:str[<=8,2]", "t:str[<=2,<=8]", "t:str[<=8]@device:0",
		"x:f32[1]]", "x y:f32[1]", "x:f32[1,1,1,1,1,1,1,1,1]", "x:f64[99999999999]", "x:f64[99999,99999,99999]",
		"x:f64[9223372036854775807]", strings.Repeat("n", MaxNameBytes+1) + ":f32[1]",
	} {
		if spec, err := ParseSpec(text); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%q became %v, %v", text, spec, err)
		}
	}
}

func TestASignatureIsCheckedAsAWhole(t *testing.T) {
	x := Spec{Name: "x", DType: F32, Shape: []int{4}}
	variable := Spec{DType: F32, Shape: []int{4, 4, 4}, Variable: []int{0, 1, 2}}
	named := func(s Spec, name string) Spec { s.Name = name; return s }
	for what, sig := range map[string]Signature{
		"nothing":       {},
		"no outputs":    {Inputs: []Spec{x}},
		"empty":         {Inputs: []Spec{x}, Outputs: []Spec{{Name: "y", DType: F32, Shape: []int{4, 0}}}},
		"a name twice":  {Inputs: []Spec{x, x}, Outputs: []Spec{x}},
		"too variable":  {Inputs: []Spec{named(variable, "a"), named(variable, "b"), named(variable, "c")}, Outputs: []Spec{x}},
		"no such dim":   {Inputs: []Spec{{Name: "x", DType: F32, Shape: []int{4}, Variable: []int{1}}}, Outputs: []Spec{x}},
		"not ascending": {Inputs: []Spec{{Name: "x", DType: F32, Shape: []int{4, 4}, Variable: []int{1, 0}}}, Outputs: []Spec{x}},
		"no such dtype": {Inputs: []Spec{{Name: "x", DType: 99, Shape: []int{4}}}, Outputs: []Spec{x}},
	} {
		if err := sig.Validate(); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	good := Signature{Inputs: []Spec{x}, Outputs: []Spec{x}, State: []Spec{{Name: "m", DType: F32, Shape: []int{0, 4}}}}
	if err := good.Validate(); err != nil || good.String() != "x:f32[4] -> x:f32[4] state m:f32[0,4]" {
		t.Errorf("%v, %v", &good, err)
	}
}

func FuzzParseTensorSpec(f *testing.F) {
	for _, text := range []string{"x:f32[3,224,224]", "tokens:i32[<=512]", "y:f64[]", "x:f32[+1]", "x:f32[01]", "x:u8[<=1,<=2]"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		spec, err := ParseSpec(text)
		if err != nil {
			return
		}
		if spec.RowBytes() < 0 || spec.RowBytes() > maxRowBytes {
			t.Fatalf("%q has rows of %d bytes", text, spec.RowBytes())
		}
		again, err := ParseSpec(spec.String())
		if err != nil || !reflect.DeepEqual(again, spec) {
			t.Fatalf("%q became %v, and that %v (%v)", text, spec, again, err)
		}
	})
}
