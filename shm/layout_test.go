// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"golang.org/x/sys/unix"
)

func TestPlanesLieApartAlignedAndExact(t *testing.T) {
	sig := testSignature(t,
		[]string{"a:bool[3]", "b:u8[5]", "c:i8[1]", "d:i16[3]", "e:i32[<=7,2]"},
		[]string{"f:i64[3]", "g:f16[5]", "h:bf16[1]", "i:f32[]", "j:f64[2,2]", "k:f8e5m2[3]"})
	l, err := NewLayout(sig, 37, 8)
	must.Do(t, err)
	end := int64(segmentHeader)
	for _, p := range append(append([]Plane{}, l.Inputs...), l.Outputs...) {
		if p.Offset < end || p.Offset%pageSize != 0 {
			t.Errorf("%s at %d, the one before ends at %d", p.Spec, p.Offset, end)
		}
		if p.Stride != int64(p.Spec.RowBytes()) {
			t.Errorf("%s: rows lie %d apart", p.Spec, p.Stride)
		}
		end = p.Offset + 37*p.Stride
	}
	if l.PlanesSize < end || l.PlanesSize%pageSize != 0 {
		t.Errorf("planes of %d bytes, the last ends at %d", l.PlanesSize, end)
	}
	if l.SlotBytes() != 3+5+1+6+56+24+10+2+4+32+3 {
		t.Errorf("a slot has %d bytes", l.SlotBytes())
	}
	plain := l.SlotBytes()
	sig.State = []tensor.Spec{{Name: "z", DType: tensor.F32, Shape: []int{3}}, {Name: "empty", DType: tensor.F32, Shape: []int{0, 4}}}
	withState, err := NewLayout(sig, 37, 8)
	must.Do(t, err)
	if n := withState.SlotBytes() - plain; n != 2*12+64 || l.Step != nil || len(l.Planes) != 11 {
		t.Errorf("state adds %d bytes; a model without it has the planes %v", n, l.Planes)
	}
	mem := make([]byte, l.PlanesSize)
	if n := len(l.Inputs[1].Rows(mem, 36, 1)); n != 5 {
		t.Errorf("the last row has %d bytes", n)
	}
	NewBoard(l, segments(t, l.BoardSize)["heap"]) // panics if it does not fit
}

func TestALayoutBeyondItsLimitsIsRefused(t *testing.T) {
	sig := testSignature(t, []string{"x:f32[4]"}, []string{"y:f32[2]"})
	for _, c := range []struct{ slots, batch int }{{0, 1}, {-1, 1}, {MaxSlots + 1, 1}, {1, 0}, {1, MaxBatchRows + 1}, {math.MaxInt, 1}} {
		if _, err := NewLayout(sig, c.slots, c.batch); !errors.Is(err, status.ErrInvalid) {
			t.Errorf("%d slots, batches of %d: %v", c.slots, c.batch, err)
		}
	}
	if _, err := NewLayout(tensor.Signature{Inputs: sig.Inputs}, 1, 1); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("no outputs: %v", err)
	}
	var many tensor.Signature
	for i := range tensor.MaxTensors - 1 { // the most there can be, all as large as can be
		many.Inputs = append(many.Inputs, tensor.Spec{Name: "x" + strings.Repeat("i", i), DType: tensor.F64, Shape: []int{(1 << 36) / 8}})
	}
	many.Outputs = sig.Outputs
	l, err := NewLayout(many, MaxSlots, 1)
	if err == nil && l.PlanesSize < int64((1<<36))*MaxSlots {
		t.Errorf("the size ran over: %d", l.PlanesSize)
	}
	many.State = []tensor.Spec{{Name: "h", DType: tensor.F32, Shape: []int{1}}}
	if _, err := NewLayout(many, 1, 1); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("65 tensors: %v", err)
	}
	many.Inputs = many.Inputs[1:]
	_, err = NewLayout(many, 1, 1)
	must.Do(t, err) // the words of the steps are no tensor
}

func TestTheGeometryDiffersForEveryChange(t *testing.T) {
	base := testSignature(t, []string{"x:f32[4]"}, []string{"y:f32[2]"})
	seen := map[uint64]string{}
	add := func(what string, sig tensor.Signature, slots, batch int) {
		g := geometry(sig.String(), slots, batch)
		if other := seen[g]; other != "" {
			t.Errorf("%s has the geometry of %s", what, other)
		}
		seen[g] = what
	}
	add("the base", base, 8, 4)
	add("more slots", base, 9, 4)
	add("larger batches", base, 8, 5)
	add("another type", testSignature(t, []string{"x:i32[4]"}, []string{"y:f32[2]"}), 8, 4)
	add("a variable dimension", testSignature(t, []string{"x:f32[<=4]"}, []string{"y:f32[2]"}), 8, 4)
	add("another name", testSignature(t, []string{"z:f32[4]"}, []string{"y:f32[2]"}), 8, 4)
	add("another order", testSignature(t, []string{"x:f32[4]", "w:f32[1]"}, []string{"y:f32[2]"}), 8, 4)
	add("the other order", testSignature(t, []string{"w:f32[1]", "x:f32[4]"}, []string{"y:f32[2]"}), 8, 4)
}

func TestAHeaderIsCheckedFieldByField(t *testing.T) {
	l := testLayout(t, 8, 4)
	s := segments(t, l.BoardSize)["memfd"]
	l.WriteHeader(s, KindBoard, 77)
	must.Do(t, l.CheckHeader(s, KindBoard, 77))
	must.Fail(t, "another kind", l.CheckHeader(s, KindPlanes, 77), status.ErrLayout)
	must.Fail(t, "another epoch", l.CheckHeader(s, KindBoard, 78), status.ErrLayout)
	for _, c := range []struct {
		what   string
		change func(*header)
		want   error
	}{
		{"magic", func(h *header) { h.Magic++ }, status.ErrLayout},
		{"version", func(h *header) { h.Version++; h.Geometry++ }, status.ErrVersion},
		{"size", func(h *header) { h.Size++ }, status.ErrLayout},
		{"geometry", func(h *header) { h.Geometry++ }, status.ErrLayout},
		{"slots", func(h *header) { h.Slots++ }, status.ErrLayout},
		{"max batch", func(h *header) { h.MaxBatch++ }, status.ErrLayout},
	} {
		l.WriteHeader(s, KindBoard, 77)
		c.change(at[header](s.mem, 0))
		if err := l.CheckHeader(s, KindBoard, 77); !errors.Is(err, c.want) {
			t.Errorf("another %s: %v", c.what, err)
		}
	}
}

func TestASegmentIsSealedAndOfTheSizeItShouldHave(t *testing.T) {
	s, err := Create("test", 8192)
	must.Do(t, err)
	defer s.Close()
	if err := unix.Ftruncate(s.FD(), 4096); err == nil {
		t.Error("it shrank")
	}
	if err := unix.Ftruncate(s.FD(), 1<<20); err == nil {
		t.Error("it grew")
	}
	dup := func() int {
		fd, err := unix.Dup(s.FD())
		must.Do(t, err)
		return fd
	}
	if _, err := Open(dup(), 4096, ReadOnly); !errors.Is(err, status.ErrLayout) {
		t.Errorf("another size: %v", err)
	}
	plain, err := unix.MemfdCreate("plain", 0)
	must.Do(t, err)
	_ = unix.Ftruncate(plain, 8192)
	if _, err := Open(plain, 8192, ReadOnly); !errors.Is(err, status.ErrLayout) {
		t.Errorf("not sealed: %v", err)
	}
	ro, err := s.ReadOnlyFD()
	must.Do(t, err)
	if _, err := unix.Mmap(ro, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); !errors.Is(err, unix.EACCES) {
		t.Errorf("mapping a read-only descriptor for writing: %v", err)
	}
	view, err := Open(ro, 8192, ReadOnly)
	must.Do(t, err)
	defer view.Close()
	s.Bytes()[5000] = 42
	if view.Bytes()[5000] != 42 {
		t.Error("the two mappings differ")
	}
}

func TestAHugeSegmentIsRefused(t *testing.T) {
	if _, err := Create("test", 1<<62); !errors.Is(err, status.ErrNoMemory) {
		t.Errorf("4 EiB: %v", err)
	}
}

func TestTensorsInDeviceMemoryLieByThemselves(t *testing.T) {
	sig, err := tensor.ParseSignature([]string{"x:f32[3]@device:0", "n:i32[1]"}, []string{"y:f16[1000]@device:0", "z:u8[1]"})
	must.Do(t, err)
	l, err := NewLayout(sig, 600, 32)
	must.Do(t, err)
	// 600 × 12 = 7,200 bytes of x take two pages; n and z are on the host as if x and y were not there.
	for i, want := range []int64{0, 4096, 8192, 8192} {
		if got := l.Planes[i].Offset; got != want {
			t.Errorf("%s lies at %d, want %d", l.Planes[i].Spec, got, want)
		}
	}
	if l.DeviceSize != 2<<20 || l.PlanesSize != 3*4096 { // 8,192 + 1,200,000, rounded up
		t.Errorf("%d bytes on the device, %d on the host", l.DeviceSize, l.PlanesSize)
	}
	host, err := tensor.ParseSignature([]string{"x:f32[3]", "n:i32[1]"}, []string{"y:f16[1000]", "z:u8[1]"})
	must.Do(t, err)
	if other, err := NewLayout(host, 600, 32); err != nil || other.Geometry == l.Geometry || other.DeviceSize != 0 {
		t.Errorf("%+v, %v", other, err)
	}
	defer func() {
		if recover() == nil {
			t.Error("bytes of a tensor in device memory")
		}
	}()
	l.Inputs[0].Row(make([]byte, l.PlanesSize), 0)
}
