// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"testing"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
)

// The ways rows can take between the ring and the device, at the size of
// ResNet's images.
const (
	benchRows  = 32
	benchRow   = 602112
	benchSlots = 512
	benchOut   = 4096
)

type bench struct {
	d        *device
	seg      *shm.Segment
	host     unsafe.Pointer
	ring, to cu.DevicePtr
	slots    []uint32
	slotsDev cu.DevicePtr
	stream   cu.Stream
}

func newBench(b *testing.B) *bench {
	k := &bench{d: gpu(b)}
	var err error
	must := func(e error) {
		b.Helper()
		if e != nil {
			b.Fatal(e)
		}
	}
	k.seg, err = shm.Memfd{}.Create("bench", benchSlots*benchRow)
	must(err)
	b.Cleanup(k.seg.Close)
	k.host = k.seg.AddressOf(0)
	copy(k.seg.Bytes(), random(1, 1<<20))
	k.ring, err = register(k.host, k.seg.Size())
	must(err)
	k.to, err = alloc(benchRows * benchRow)
	must(err)
	k.slots, k.slotsDev, err = hostWords(benchRows)
	must(err)
	k.stream, err = cu.MakeStream(cu.NonBlocking)
	must(err)
	return k
}

// measure times rounds of queueing and waiting; each round takes other slots.
func (k *bench) measure(b *testing.B, bytes int, round func(first int) error) {
	b.SetBytes(int64(bytes))
	for i := 0; b.Loop(); i++ {
		first := i % 8
		for r := range k.slots {
			k.slots[r] = uint32((first + 7*r) % benchSlots)
		}
		must.Do(b, round(first))
		must.Do(b, checked("cuStreamSynchronize", k.stream.Synchronize()))
	}
	b.ReportMetric(float64(bytes)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GB/s")
}

func BenchmarkInputsByOneCopy(b *testing.B) {
	k := newBench(b)
	k.measure(b, benchRows*benchRow, func(first int) error {
		return checked("cuMemcpyHtoDAsync", cu.MemcpyHtoDAsync(k.to, unsafe.Add(k.host, first*benchRows*benchRow), benchRows*benchRow, k.stream))
	})
}

func BenchmarkInputsByGather(b *testing.B) {
	k := newBench(b)
	k.measure(b, benchRows*benchRow, func(int) error {
		return launch(k.stream, k.d.gather, moveDims(&shm.Plane{}, benchRow, benchRows), word(k.to), word(benchRow), word(k.ring), word(benchRow), word(k.slotsDev),
			word(benchRow), word(benchRows), word(benchRows))
	})
}

func BenchmarkInputsByCopyPerSlot(b *testing.B) {
	k := newBench(b)
	k.measure(b, benchRows*benchRow, func(int) error {
		for r, s := range k.slots {
			if err := checked("cuMemcpyHtoDAsync", cu.MemcpyHtoDAsync(k.to+cu.DevicePtr(r*benchRow), unsafe.Add(k.host, int(s)*benchRow), benchRow, k.stream)); err != nil {
				return err
			}
		}
		return nil
	})
}

func BenchmarkOutputsByScatter(b *testing.B) {
	k := newBench(b)
	k.measure(b, benchRows*benchOut, func(int) error {
		return launch(k.stream, k.d.scatter, moveDims(&shm.Plane{}, benchOut, benchRows), word(k.ring), word(benchOut), word(k.to), word(benchOut), word(k.slotsDev),
			word(benchOut), word(benchRows))
	})
}

func BenchmarkOutputsByCopyPerSlot(b *testing.B) {
	k := newBench(b)
	k.measure(b, benchRows*benchOut, func(int) error {
		for r, s := range k.slots {
			if err := checked("cuMemcpyDtoHAsync", cu.MemcpyDtoHAsync(unsafe.Add(k.host, int(s)*benchOut), k.to+cu.DevicePtr(r*benchOut), benchOut, k.stream)); err != nil {
				return err
			}
		}
		return nil
	})
}
