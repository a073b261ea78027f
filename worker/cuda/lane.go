// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"errors"
	"slices"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

// moveBlocks is how many blocks move rows over the bus. 32 KiB are in flight
// per block of 512 threads; a few dozen of them saturate the bus, and leave
// the other multiprocessors to the batch that computes meanwhile.
const (
	moveBlocks  = 48
	moveThreads = 512
	moveChunk   = 16384 // RB_CHUNK of kernels/common.h
)

// copyRuns is the most contiguous runs of a batch that come in by copies; with
// more, the gather kernel is faster.
const copyRuns = 2

// deviceBlocks is how many blocks move rows within device memory, which is many
// times as fast as the bus.
const deviceBlocks = 264

// ring is a mapping that the device can reach, and its device memory.
type ring struct {
	layout *shm.Layout
	host   unsafe.Pointer
	dev    cu.DevicePtr
	shared *sharedMemory // nil: all tensors are on the host
}

func openRing(layout *shm.Layout, seg *shm.Segment, shared *sharedMemory) (*ring, error) {
	// Pinning takes every page of the ring. If a memory cgroup has no room for
	// them, Populate returns an error, where the kernel would kill.
	if err := seg.Populate(shm.Range{Length: seg.Size()}); err != nil {
		return nil, err
	}
	r := &ring{layout: layout, host: seg.AddressOf(0), shared: shared}
	var err error
	r.dev, err = register(r.host, seg.Size())
	return r, err
}

func (r *ring) close() error { return unregister(r.host) }

// plane is the address of a tensor's rows for the GPU.
func (r *ring) plane(p *shm.Plane) cu.DevicePtr {
	if p.Spec.OnDevice() {
		return r.shared.base + cu.DevicePtr(p.Offset)
	}
	return r.dev + cu.DevicePtr(p.Offset)
}

// rows is a batch as a lane sees it.
type rows interface {
	Rows() int
	PadTo() int
	Slots() []uint32
	Runs() []worker.Run
	RowShape(side, k int) []int // side 0: inputs
}

// rowBytes is the size of a row of the k-th input in this batch.
func rowBytes(b rows, layout *shm.Layout, k int) int64 {
	n := int64(layout.Inputs[k].Spec.DType.Size())
	for _, d := range b.RowShape(0, k) {
		n *= int64(d)
	}
	return n
}

// ringBatch is a batch of the ring.
type ringBatch struct{ *worker.Batch }

func (b ringBatch) RowShape(side, k int) []int {
	if side == 0 {
		return b.Input(k).RowShape()
	}
	return b.Output(k).RowShape()
}

// lane is room for one batch in flight: a stream, and device memory for every
// tensor. Its buffers hold rows packed by the row size of the batch.
type lane struct {
	d        *device
	r        *ring
	stream   cu.Stream
	finished cu.Event
	slots    []uint32 // pinned; the kernels read it
	slotsDev cu.DevicePtr
	near     cu.DevicePtr   // a copy of slots in device memory, for planes there: reading the host's would delay 264 blocks; or 0
	room     []cu.DevicePtr // for the inputs
	in, out  []cu.DevicePtr // in is room, or the slots of a batch that is read in place
	batch    rows           // nil while the lane is free
	owned    []cu.DevicePtr // to be freed
	scratch  any            // of the model
}

// newLanes makes lanes for batches of at most some rows, with their padding, that are prepared for a program.
func newLanes(d *device, r *ring, p program, count, rows int) (list []*lane, err error) {
	for range count {
		l, err := newLane(d, r, p.inPlace(), int64(rows))
		if err == nil {
			list = append(list, l)
			err = p.prepare(l, rows)
		}
		if err != nil {
			closeLanes(list)
			return nil, err
		}
	}
	return list, nil
}

func closeLanes(list []*lane) {
	for _, l := range list {
		l.close()
	}
}

func newLane(d *device, r *ring, sameInOut bool, rows int64) (l *lane, err error) {
	l = &lane{d: d, r: r}
	defer func() {
		if err != nil {
			l.close()
			l = nil
		}
	}()
	if l.stream, err = cu.MakeStream(cu.NonBlocking); err != nil {
		return l, checked("cuStreamCreate", err)
	}
	if l.finished, err = cu.MakeEvent(cu.DisableTiming); err != nil {
		return l, checked("cuEventCreate", err)
	}
	layout := r.layout
	if l.slots, l.slotsDev, err = hostWords(layout.MaxBatch); err != nil {
		return l, err
	}
	if r.shared != nil {
		if l.near, err = l.buffer(4 * int64(layout.MaxBatch)); err != nil {
			return l, err
		}
	}
	if l.room, err = l.buffers(layout.Inputs, rows); err != nil {
		return l, err
	}
	l.in = slices.Clone(l.room)
	if l.out = l.in; !sameInOut {
		l.out, err = l.buffers(layout.Outputs, rows)
	}
	return l, err
}

func (l *lane) buffers(planes []shm.Plane, rows int64) ([]cu.DevicePtr, error) {
	var list []cu.DevicePtr
	for _, p := range planes {
		b, err := l.buffer(rows * p.Stride)
		if err != nil {
			return nil, err
		}
		list = append(list, b)
	}
	return list, nil
}

// buffer is device memory that goes with the lane.
func (l *lane) buffer(size int64) (cu.DevicePtr, error) {
	p, err := alloc(size)
	if err == nil {
		l.owned = append(l.owned, p)
	}
	return p, err
}

// close gives the lane's memory back. After a lost context every call fails,
// and the process ends.
func (l *lane) close() {
	for _, p := range l.owned {
		_ = cu.MemFree(p)
	}
	if l.slots != nil {
		_ = freeHostWords(l.slots)
	}
	if l.finished != (cu.Event{}) {
		_ = cu.DestroyEvent(&l.finished)
	}
	if l.stream != (cu.Stream{}) {
		_ = l.stream.Destroy()
	}
}

// submit queues a batch: inputs, model, outputs, and the event at its end.
func (l *lane) submit(b rows, p program) error {
	l.batch = b
	copy(l.slots, b.Slots())
	if l.near != 0 && len(b.Runs()) > 1 {
		err := cu.MemcpyHtoDAsync(l.near, unsafe.Pointer(&l.slots[0]), int64(4*b.Rows()), l.stream)
		if err := checked("cuMemcpyHtoDAsync", err); err != nil {
			return err
		}
	}
	for k := range l.in {
		if err := l.read(k, p.readsSlots()); err != nil {
			return err
		}
	}
	if err := p.enqueue(l); err != nil {
		return err
	}
	for k := range l.out {
		if err := l.write(k); err != nil {
			return err
		}
	}
	return checked("cuEventRecord", l.finished.Record(l.stream))
}

// read brings the k-th input of all rows into contiguous device memory. With
// inSlots, rows that are contiguous device memory already stay in their slots.
func (l *lane) read(k int, inSlots bool) error {
	b, plane := l.batch, &l.r.layout.Inputs[k]
	size := rowBytes(b, l.r.layout, k)
	runs := b.Runs()
	whole := size == plane.Stride && b.PadTo() == b.Rows()
	l.in[k] = l.room[k]
	if inSlots && whole && len(runs) == 1 && plane.Spec.OnDevice() {
		l.in[k] = l.r.plane(plane) + cu.DevicePtr(int64(runs[0].Slot)*plane.Stride)
		return nil
	}
	if whole && len(runs) <= copyRuns {
		for _, run := range runs {
			at, n := int64(run.Slot)*plane.Stride, int64(run.Rows)*size
			to := l.in[k] + cu.DevicePtr(int64(run.Row)*size)
			var err error
			if plane.Spec.OnDevice() {
				err = checked("cuMemcpyDtoDAsync", cu.MemcpyDtoDAsync(to, l.r.plane(plane)+cu.DevicePtr(at), n, l.stream))
			} else {
				err = checked("cuMemcpyHtoDAsync", cu.MemcpyHtoDAsync(to, unsafe.Add(l.r.host, plane.Offset+at), n, l.stream))
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return launch(l.stream, l.d.gather, moveDims(plane, size, b.PadTo()), word(l.in[k]), word(size),
		word(l.r.plane(plane)), word(plane.Stride), word(l.numbers(plane)), word(size), word(b.Rows()), word(b.PadTo()))
}

// numbers is the address of the slot numbers for kernels that move rows of a plane.
func (l *lane) numbers(p *shm.Plane) cu.DevicePtr {
	if p.Spec.OnDevice() && len(l.batch.Runs()) > 1 {
		return l.near
	}
	return l.slotsDev
}

// write puts the k-th output of all rows into their slots.
func (l *lane) write(k int) error {
	b, plane := l.batch, &l.r.layout.Outputs[k]
	size := plane.Stride
	if l.out[k] == l.in[k%len(l.in)] { // computed in place: the input's row size
		size = rowBytes(b, l.r.layout, k)
	}
	if runs := b.Runs(); plane.Spec.OnDevice() && len(runs) == 1 && size == plane.Stride {
		to := l.r.plane(plane) + cu.DevicePtr(int64(runs[0].Slot)*size)
		return checked("cuMemcpyDtoDAsync", cu.MemcpyDtoDAsync(to, l.out[k], int64(b.Rows())*size, l.stream))
	}
	return launch(l.stream, l.d.scatter, moveDims(plane, size, b.Rows()), word(l.r.plane(plane)), word(plane.Stride),
		word(l.out[k]), word(size), word(l.numbers(plane)), word(size), word(b.Rows()))
}

func moveDims(p *shm.Plane, rowBytes int64, rows int) dims {
	units, most := int64(rows)*((rowBytes+moveChunk-1)/moveChunk), int64(moveBlocks)
	if p.Spec.OnDevice() {
		most = deviceBlocks
	}
	return dims{gridX: int(min(units, most)), block: moveThreads}
}

// done reports whether the batch is done. After an error of a kernel or a copy
// the context is lost.
func (l *lane) done() (bool, error) {
	err := checked("cuEventQuery", l.finished.Query())
	var e *Error
	if errors.As(err, &e) && e.Code == int(cu.NotReady) {
		return false, nil
	}
	return err == nil, err
}
