// SPDX-License-Identifier: Apache-2.0

package npy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// The files in testdata were written by numpy 2.4.6:
//
//	names = {'bool':'?', 'u8':'u1', 'i8':'i1', 'i16':'<i2', 'i32':'<i4', 'i64':'<i8', 'f16':'<f2', 'f32':'<f4', 'f64':'<f8'}
//	for n, d in names.items():
//	    np.save(n + '.npy', (np.arange(6) - 1).astype(d).reshape(2, 3))
//	np.save('scalar.npy', np.array(2.5, '<f4'))
//	np.save('vector.npy', np.arange(5, dtype='<i4'))
//	np.save('empty.npy', np.zeros((0, 7), '<f8'))
//	a = np.arange(6, dtype='<f4').reshape(2, 3)
//	for v in (2, 3):
//	    with open(f'version{v}.npy', 'wb') as h: np.lib.format.write_array(h, a, version=(v, 0))
//	np.save('refused_fortran.npy', np.asfortranarray(a))
//	np.save('refused_bigendian.npy', a.astype('>f4'))
//	np.save('refused_complex.npy', a.astype('<c8'))
//	np.save('refused_struct.npy', np.zeros(2, dtype=[('x', '<f4'), ('y', '<i4')]))

const testLimit = 1 << 20

func fixture(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name+".npy"))
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

var fixtures = map[string]Array{
	"bool":   {"bool", []int{2, 3}, []byte{1, 0, 1, 1, 1, 1}},
	"u8":     {"u8", []int{2, 3}, []byte{255, 0, 1, 2, 3, 4}},
	"i8":     {"i8", []int{2, 3}, le([]int8{-1, 0, 1, 2, 3, 4})},
	"i16":    {"i16", []int{2, 3}, le([]int16{-1, 0, 1, 2, 3, 4})},
	"i32":    {"i32", []int{2, 3}, le([]int32{-1, 0, 1, 2, 3, 4})},
	"i64":    {"i64", []int{2, 3}, le([]int64{-1, 0, 1, 2, 3, 4})},
	"f16":    {"f16", []int{2, 3}, le([]uint16{0xbc00, 0, 0x3c00, 0x4000, 0x4200, 0x4400})},
	"f32":    {"f32", []int{2, 3}, le([]float32{-1, 0, 1, 2, 3, 4})},
	"f64":    {"f64", []int{2, 3}, le([]float64{-1, 0, 1, 2, 3, 4})},
	"scalar": {"f32", []int{}, le([]float32{2.5})},
	"vector": {"i32", []int{5}, le([]int32{0, 1, 2, 3, 4})},
	"empty":  {"f64", []int{0, 7}, []byte{}},
}

func TestFilesOfNumpyAreReadAndWrittenBackByteForByte(t *testing.T) {
	for name, want := range fixtures {
		file := fixture(t, name)
		got, err := Read(bytes.NewReader(file), testLimit)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %v, want %v", name, got, want)
		}
		var b bytes.Buffer
		if err := Write(&b, got); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !bytes.Equal(b.Bytes(), file) {
			t.Errorf("%s: written\n%q\nnumpy wrote\n%q", name, b.Bytes(), file)
		}
	}
}

func TestVersions2And3AreRead(t *testing.T) {
	want := Array{"f32", []int{2, 3}, le([]float32{0, 1, 2, 3, 4, 5})}
	for _, name := range []string{"version2", "version3"} {
		got, err := Read(bytes.NewReader(fixture(t, name)), testLimit)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestUnsupportedFilesAreRefusedByName(t *testing.T) {
	for name, word := range map[string]string{
		"refused_fortran": "fortran_order", "refused_bigendian": "big endian",
		"refused_complex": `"<c8"`, "refused_struct": "structured",
	} {
		_, err := Read(bytes.NewReader(fixture(t, name)), testLimit)
		if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), word) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEveryTruncationIsAClearError(t *testing.T) {
	file := fixture(t, "f32")
	for n := range file {
		if _, err := Read(bytes.NewReader(file[:n]), testLimit); !errors.Is(err, ErrTruncated) {
			t.Errorf("%d of %d bytes: %v", n, len(file), err)
		}
	}
}

func withHeader(text string) []byte {
	b := append([]byte("\x93NUMPY\x02\x00"), 0, 0, 0, 0)
	binary.LittleEndian.PutUint32(b[8:], uint32(len(text)))
	return append(b, text...)
}

func TestBadHeadersAreRefused(t *testing.T) {
	for text, want := range map[string]error{
		``:                        ErrFormat,
		`[]`:                      ErrFormat,
		`{}`:                      ErrFormat,
		`{'descr': '<f4'}`:        ErrFormat,
		`{'descr': '<f4', 'descr`: ErrFormat,
		`{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}`:                    ErrFormat,
		`{'descr': '<f4', 'fortran_order': False, 'shape': (), 'x': 1}`:                            ErrFormat,
		`{'descr': '<f4' 'fortran_order': False, 'shape': ()}`:                                     ErrFormat,
		`{'descr': '<f4', 'fortran_order': Maybe, 'shape': ()}`:                                    ErrFormat,
		`{'descr': '<f4', 'fortran_order': False, 'shape': (1)}`:                                   ErrFormat,
		`{'descr': '<f4', 'fortran_order': False, 'shape': (1 2)}`:                                 ErrFormat,
		`{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}`:                                 ErrFormat,
		`{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}`:               ErrFormat,
		`{'descr': '<f4', 'fortran_order': False, 'shape': ()} x`:                                  ErrFormat,
		`{'descr': '<f4', 'fortran_order': False, 'shape': (` + strings.Repeat("1,", 65) + `)}`:    ErrFormat,
		`{'descr': '<f\x34', 'fortran_order': False, 'shape': ()}`:                                 ErrFormat,
		`{'descr': '=f4', 'fortran_order': False, 'shape': ()}`:                                    ErrUnsupported,
		`{'descr': '|O', 'fortran_order': False, 'shape': ()}`:                                     ErrUnsupported,
		`{'descr': '<f4', 'fortran_order': False, 'shape': (262145,)}`:                             ErrTooLarge,
		`{'descr': '<f8', 'fortran_order': False, 'shape': (9223372036854775807, 3)}`:              ErrTooLarge,
		`{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4294967296)}`:  ErrTooLarge,
		`{"shape": (1L, 1), "fortran_order": False, "descr": "<f4"}` + strings.Repeat(" ", 65<<10): ErrTooLarge,
		`{"shape": (1L, 1,),"fortran_order":False,"descr":"<f4"}` + "  \n":                         ErrTruncated,
		`{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9223372036854775807, 3)}`:           nil,
	} {
		if _, err := Read(bytes.NewReader(withHeader(text)), testLimit); !errors.Is(err, want) {
			t.Errorf("%.90q: %v, want %v", text, err, want)
		}
	}
	for _, pre := range []string{"\x93NUMPZ\x01\x00\x00\x00", "\x93NUMPY\x00\x00\x00\x00", "\x93NUMPY\x04\x00\x00\x00",
		"\x93NUMPY\x01\x01\x00\x00"} {
		if _, err := Read(strings.NewReader(pre), testLimit); !errors.Is(err, ErrFormat) && !errors.Is(err, ErrUnsupported) {
			t.Errorf("%q: %v", pre, err)
		}
	}
}

func TestAGreatPromiseCostsNoMemoryBeforeItIsKept(t *testing.T) {
	file := withHeader(`{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776,)}`)
	if _, err := Read(bytes.NewReader(append(file, 1, 2, 3)), math.MaxInt64); !errors.Is(err, ErrTruncated) {
		t.Error(err)
	}
}

func TestLargeDataArrivesWholeAndTheRestStaysUnread(t *testing.T) {
	want := Array{"u8", []int{3, 1 << 20}, bytes.Repeat([]byte("abc"), 1<<20)}
	var b bytes.Buffer
	for range 2 {
		must.Do(t, Write(&b, want))
	}
	for range 2 {
		got, err := Read(&b, 3<<20)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatal("array differs", err)
		}
	}
	if b.Len() != 0 {
		t.Errorf("%d bytes left", b.Len())
	}
}

func TestAnArrayThatContradictsItselfIsNotWritten(t *testing.T) {
	for _, a := range []Array{
		{"f32", []int{2}, make([]byte, 7)}, {"bf16", []int{1}, make([]byte, 2)}, {"f32", []int{-1}, nil},
		{"", nil, nil}, {"u8", []int{math.MaxInt, 2}, nil}, {"u8", make([]int, 65), nil},
	} {
		if err := Write(io.Discard, a); err == nil {
			t.Errorf("%v was written", a)
		}
	}
}

// FuzzRead: nothing panics, and whatever is accepted survives a round trip.
func FuzzRead(f *testing.F) {
	for name := range fixtures {
		f.Add(fixture(f, name))
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		a, err := Read(bytes.NewReader(file), testLimit)
		if err != nil {
			return
		}
		var b bytes.Buffer
		if err := Write(&b, a); err != nil {
			t.Fatalf("read but not written: %v", err)
		}
		again, err := Read(&b, testLimit)
		if err != nil || !reflect.DeepEqual(a, again) {
			t.Fatalf("%v became %v (%v)", a, again, err)
		}
	})
}
