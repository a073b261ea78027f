// SPDX-License-Identifier: Apache-2.0

package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// The files in testdata were written by safetensors 0.8.0 from numpy 2.4.6 arrays:
//
//	names = {'bool':'?', 'u8':'u1', 'i8':'i1', 'i16':'<i2', 'i32':'<i4', 'i64':'<i8', 'f16':'<f2', 'f32':'<f4', 'f64':'<f8'}
//	t = {n: (np.arange(6) - 1).astype(d).reshape(2, 3) for n, d in names.items()}
//	t['scalar'] = np.array(2.5, '<f4'); t['empty'] = np.zeros((0, 7), '<f8'); t['näme "<&>"'] = np.arange(3, dtype='u1')
//	save_file(t, 'numpy.safetensors', metadata={'made by': 'numpy'})
//	save_file({'b': np.array([1, 2], ml_dtypes.bfloat16)}, 'bf16.safetensors')
//	save_file({'x': np.arange(2, dtype='<u4')}, 'refused_u32.safetensors')

func fixture(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name+".safetensors"))
	must.Do(t, err)
	return b
}

func le(v any) []byte {
	var b bytes.Buffer
	if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// contents is a tensor with its data.
type contents struct {
	name, dtype string
	shape       []int
	data        []byte
}

func parse(file []byte) ([]contents, error) {
	f, err := New(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		return nil, err
	}
	var all []contents
	names := slices.SortedFunc(maps.Keys(f.Tensors), func(a, b string) int {
		x, y := f.Tensors[a], f.Tensors[b]
		return cmp.Or(cmp.Compare(x.at, y.at), cmp.Compare(x.Bytes, y.Bytes))
	})
	for _, name := range names {
		data, err := io.ReadAll(f.Reader(name))
		if err != nil {
			return nil, err
		}
		all = append(all, contents{name, f.Tensors[name].DType, f.Tensors[name].Shape, data})
	}
	return all, nil
}

func TestAFileFromNumpyIsRead(t *testing.T) {
	shape := []int{2, 3}
	want := []contents{
		{"i64", "i64", shape, le([]int64{-1, 0, 1, 2, 3, 4})},
		{"empty", "f64", []int{0, 7}, []byte{}},
		{"f64", "f64", shape, le([]float64{-1, 0, 1, 2, 3, 4})},
		{"f32", "f32", shape, le([]float32{-1, 0, 1, 2, 3, 4})},
		{"scalar", "f32", []int{}, le([]float32{2.5})},
		{"i32", "i32", shape, le([]int32{-1, 0, 1, 2, 3, 4})},
		{"f16", "f16", shape, le([]uint16{0xbc00, 0, 0x3c00, 0x4000, 0x4200, 0x4400})},
		{"i16", "i16", shape, le([]int16{-1, 0, 1, 2, 3, 4})},
		{"i8", "i8", shape, le([]int8{-1, 0, 1, 2, 3, 4})},
		{`näme "<&>"`, "u8", []int{3}, []byte{0, 1, 2}},
		{"u8", "u8", shape, []byte{255, 0, 1, 2, 3, 4}},
		{"bool", "bool", shape, []byte{1, 0, 1, 1, 1, 1}},
	}
	file := fixture(t, "numpy")
	got, err := parse(file)
	must.Do(t, err)
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestBfloat16IsKeptAsItIs(t *testing.T) {
	file := fixture(t, "bf16")
	got, err := parse(file)
	want := []contents{{"b", "bf16", []int{2}, []byte{0x80, 0x3f, 0x00, 0x40}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%v, %v", got, err)
	}
}

func TestATypeWeDoNotKnowIsRefusedByName(t *testing.T) {
	_, err := parse(fixture(t, "refused_u32"))
	if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), `"U32"`) {
		t.Error(err)
	}
}

func TestEveryTruncationAndEveryExtraByteIsRefused(t *testing.T) {
	file := fixture(t, "numpy")
	for n := range file {
		if _, err := parse(file[:n]); !errors.Is(err, ErrFormat) {
			t.Errorf("%d of %d bytes: %v", n, len(file), err)
		}
	}
	if _, err := parse(append(file, 0)); !errors.Is(err, ErrFormat) {
		t.Errorf("one more byte: %v", err)
	}
}

func withHeader(text string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(b, text...), make([]byte, data)...)
}

func TestBadHeadersAreRefused(t *testing.T) {
	const a = `"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}`
	for text, data := range map[string]int{
		``: 0, ` {}`: 0, `[]`: 0, `{`: 0, `{}x`: 0, `{} {}`: 0, `{"a":1}`: 0, `{"a":null}`: 0,
		`{` + a + `}`:  1, // past the end
		`{` + a + ` }`: 3, // data without a tensor
		`{` + a + `,"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`:                              3, // overlap
		`{` + a + `,"b":{"dtype":"U8","shape":[1],"data_offsets":[3,4]}}`:                              4, // hole
		`{` + a + `,"b":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`:                              2, // the same bytes twice
		`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,2]}}`:                                        2, // shape against offsets
		`{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}`:                                        2,
		`{"a":{"dtype":"U8","shape":[2],"data_offsets":[-2,0]}}`:                                       2,
		`{"a":{"dtype":"U8","shape":[-1,-2],"data_offsets":[0,2]}}`:                                    2,
		`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,3]}}`:                                      2,
		`{"a":{"dtype":"U8","shape":[2.5],"data_offsets":[0,2]}}`:                                      2,
		`{"a":{"dtype":"U8","data_offsets":[0,1]}}`:                                                    1,
		`{"a":{"shape":[1],"data_offsets":[0,1]}}`:                                                     1,
		`{"a":{"dtype":"F64","shape":[4611686018427387904,4611686018427387904],"data_offsets":[0,0]}}`: 0,
		`{"a":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}}`:    8,
		`{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}}`:                     1,
		"{\"\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}":                           1,
	} {
		if _, err := parse(withHeader(text, data)); !errors.Is(err, ErrFormat) {
			t.Errorf("%.100q with %d bytes: %v", text, data, err)
		}
	}
	for _, n := range []uint64{MaxHeaderBytes + 1, math.MaxUint64, math.MaxInt64, 3} {
		if _, err := parse(append(binary.LittleEndian.AppendUint64(nil, n), "{}"...)); !errors.Is(err, ErrFormat) {
			t.Errorf("header length %d: %v", n, err)
		}
	}
}

func TestAnEmptyFileOfNoTensorsIsFine(t *testing.T) {
	if got, err := parse(withHeader("{}      ", 0)); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestWhatIsNotThereIsNotOpened(t *testing.T) {
	f, err := Open("testdata/numpy.safetensors")
	must.Do(t, err)
	defer f.Close()
	if n := f.Reader("b").Size(); n != 0 {
		t.Errorf("a tensor that is not there has %d bytes", n)
	}
	if _, err := Open("testdata"); err == nil {
		t.Error("a folder was opened")
	}
	if _, err := Open("testdata/none"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// FuzzNew: nothing panics, and of whatever is accepted every byte of data belongs to one tensor.
func FuzzNew(f *testing.F) {
	f.Add(fixture(f, "numpy"))
	f.Add(fixture(f, "bf16"))
	f.Fuzz(func(t *testing.T, file []byte) {
		tensors, err := parse(file)
		if err != nil {
			return
		}
		data := []byte{}
		for _, x := range tensors {
			data = append(data, x.data...)
		}
		if want := file[8+binary.LittleEndian.Uint64(file):]; !bytes.Equal(data, want) {
			t.Fatalf("tensors hold %q, the file %q", data, want)
		}
	})
}
