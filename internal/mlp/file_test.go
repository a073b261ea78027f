// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/npy"
)

type entry struct {
	name  string
	dtype string
	shape []int
	data  []float32
}

// npz writes the entries as numpy.savez does.
func npz(t *testing.T, entries ...entry) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "net.npz")
	f, err := os.Create(path)
	must.Do(t, err)
	z := zip.NewWriter(f)
	for _, e := range entries {
		w, err := z.CreateHeader(&zip.FileHeader{Name: e.name + ".npy", Method: zip.Store})
		must.Do(t, err)
		var data []byte
		for _, v := range e.data {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(v))
		}
		must.Do(t, npy.Write(w, npy.Array{DType: e.dtype, Shape: e.shape, Data: data}))
	}
	must.Do(t, z.Close())
	must.Do(t, f.Close())
	return path
}

func TestAModelOfAFileHasItsWeights(t *testing.T) {
	path := npz(t, entry{"2.bias", "f32", []int{1}, []float32{0.5}}, entry{"2.weight", "f32", []int{1, 3}, []float32{1, 10, 100}},
		entry{"0.weight", "f32", []int{3, 2}, []float32{1, 0, 0, 1, -1, -1}}, entry{"0.bias", "f32", []int{3}, []float32{0, 0, 5}})
	for _, k := range kernels() {
		m, err := loadOn(k, path)
		must.Do(t, err)
		y := make([]float32, 2)
		m.Forward(y, []float32{2, -3, 4, 4}, 2)
		if y[0] != 2+100*6+0.5 || y[1] != 4+40+0.5 {
			t.Errorf("%s: got %v", m.Kernel(), y)
		}
	}
}

func TestAFileThatIsNoNetIsRefusedWithAReason(t *testing.T) {
	weight, bias := entry{"w.weight", "f32", []int{2, 2}, make([]float32, 4)}, entry{"w.bias", "f32", []int{2}, make([]float32, 2)}
	for _, c := range []struct {
		want    string
		entries []entry
	}{
		{"0 arrays", nil},
		{"1 arrays", []entry{weight}},
		{`array 1 is "w.weight", want "w.bias"`, []entry{weight, weight}},
		{`array 0 is "w.bias", want ".weight"`, []entry{bias, bias}},
		{`array 1 is "10.bias", want "0.bias"`, []entry{{"0.weight", "f32", []int{2, 2}, make([]float32, 4)}, {"10.bias", "f32", []int{2}, make([]float32, 2)}}},
		{"whether 0.weight follows w.weight", []entry{{"0.weight", "f32", []int{2, 2}, make([]float32, 4)}, {"0.bias", "f32", []int{2}, make([]float32, 2)}, weight, bias}},
		{"not finite", []entry{weight, {"w.bias", "f32", []int{2}, []float32{0, float32(math.Inf(-1))}}}},
		{"i32, want float32", []entry{{"w.weight", "i32", []int{2, 2}, make([]float32, 4)}}},
		{"shape [4], want [out, in]", []entry{{"w.weight", "f32", []int{4}, make([]float32, 4)}}},
		{"shape [1], want [2]", []entry{weight, {"w.bias", "f32", []int{1}, make([]float32, 1)}}},
		{"the layer before has 2 outputs", []entry{weight, bias, {"v.weight", "f32", []int{2, 1}, make([]float32, 2)}}},
		{"size 1 is 0", []entry{{"w.weight", "f32", []int{0, 2}, nil}, {"w.bias", "f32", []int{0}, nil}}},
	} {
		if _, err := Load(npz(t, c.entries...)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
	broken := npz(t, weight, entry{"w.bias", "f32", []int{2}, []float32{1.5, 1.5}})
	data, err := os.ReadFile(broken)
	must.Do(t, err)
	must.Do(t, os.WriteFile(broken, bytes.Replace(data, []byte{0xc0, 0x3f}, []byte{0xc0, 0x40}, 1), 0o600))
	if _, err := Load(broken); !errors.Is(err, zip.ErrChecksum) {
		t.Error(err)
	}
	text := filepath.Join(t.TempDir(), "net.txt")
	must.Do(t, os.WriteFile(text, []byte("0.5 1.5"), 0o600))
	if _, err := Load(text); err == nil || !strings.Contains(err.Error(), "no .npz file") {
		t.Error(err)
	}
}
