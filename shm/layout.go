// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// A model has two segments, and every session (a client's or a worker's
// connection) one more:
//
//	planes  (all peers: read, write)        the tensors, nothing else
//	board   (broker, workers: write;        how requests ended
//	         clients: read only)
//	session (one peer and the broker)       messages between the two
//
// A client can write only payload bytes and its session: it may spoil data inside its
// trust domain, but it cannot stop another client's progress.
//
// Every segment begins with one page:
//
//	0                                64                        4096
//	+--------------------------------+------------ … ------------+
//	| header                         | words of this kind        |
//	+--------------------------------+------------ … ------------+
type header struct {
	Magic    uint64
	Version  uint32 // checked before any other field is used
	Kind     Kind
	Size     uint64 // of the whole segment
	Epoch    uint64 // of the broker that made the segment
	Geometry uint64 // see geometry
	Slots    uint32
	MaxBatch uint32 // rows
	_        [16]byte
}

// magic is "RINGBTCH" read as a little-endian number.
const magic uint64 = 0x484354_42474e4952

// A Kind tells segments apart.
type Kind uint32

const (
	KindPlanes Kind = iota + 1
	KindBoard
	KindClient
	KindWorker
	kindWeights
)

// Plane is the place of one tensor: its row of slot i is at Offset + i*Stride. Stride is
// the exact size of a row, so that consecutive slots are one contiguous tensor. For a
// tensor in device memory, Offset counts from the start of the ring's device memory,
// and this process cannot read its rows.
type Plane struct {
	Spec   tensor.Spec
	Offset int64
	Stride int64
}

// Layout is the layout of a model's shared memory. It depends only on the tensors, the
// slots and the maximum batch: every peer computes it and compares the fingerprint.
//
//	planes segment                          board segment
//	+--------+ 0                            +---------------------+ 0
//	| header |                              | header              |
//	+--------+ 4096                         +---------------------+ 4096
//	| in[0]  |  slots × row                 | bells    slots × 64 |
//	+--------+ next multiple of 4096        | words    slots × 8  |
//	| in[1]  |                              | records  slots × 64 |
//	|  …     |                              | reasons  slots × 1024
//	| out[0] |                              +---------------------+
//	|  …     |                              (each on a multiple of 4096)
//	| states |  if the model has state:
//	|  @step |  see StatePlanes
//	+--------+
//
// Tensors in device memory are laid out likewise, from byte 0, in a separate allocation
// that a worker makes. It has no header: the broker could not read it.
//
// The ring of a pipeline also has planes for the tensors between its stages. Clients, and
// the workers of each stage, use some of the planes as inputs and outputs: see
// NewPipelineLayout and View.
type Layout struct {
	Signature       tensor.Signature
	Ties            tensor.Ties // of the signature
	Slots, MaxBatch int
	Inputs, Outputs []Plane
	State           []Plane // a row has two halves: see StatePlanes
	Step            *Plane  // nil without State
	Planes          []Plane // all planes in order
	PlanesSize      int64
	DeviceSize      int64 // of the device memory; 0 if no tensor is there
	BoardSize       int64
	Geometry        uint64

	bellsAt, wordsAt, recordsAt, reasonsAt int64
}

// NewLayout computes the layout of a model. The error names the limit that it exceeds.
func NewLayout(sig tensor.Signature, slots, maxBatch int) (*Layout, error) {
	if err := sig.Validate(); err != nil {
		return nil, err
	}
	if len(sig.State) > 0 {
		return NewPipelineLayout(slices.Concat(sig.Inputs, sig.Outputs, StatePlanes(sig.State)), sig, slots, maxBatch)
	}
	l, err := place(slices.Concat(sig.Inputs, sig.Outputs), slots, maxBatch)
	if err != nil {
		return nil, err
	}
	l.Signature, l.Ties, l.Geometry = sig, sig.Ties(), geometry(sig.String(), slots, maxBatch)
	l.Inputs, l.Outputs = l.Planes[:len(sig.Inputs):len(sig.Inputs)], l.Planes[len(sig.Inputs):]
	return l, nil
}

// NewPipelineLayout is the layout of a ring with these planes, for a peer with the inputs
// and outputs of sig.
func NewPipelineLayout(planes []tensor.Spec, sig tensor.Signature, slots, maxBatch int) (*Layout, error) {
	tensors := len(planes)
	if tensors > 0 && planes[tensors-1].Name == stepPlane.Name {
		tensors--
	}
	if tensors > tensor.MaxTensors {
		return nil, fmt.Errorf("%w: a pipeline of %d tensors, at most %d", status.ErrInvalid, tensors, tensor.MaxTensors)
	}
	for i := range planes {
		if slices.ContainsFunc(planes[:i], func(t tensor.Spec) bool { return t.Name == planes[i].Name }) {
			return nil, fmt.Errorf("%w: tensor %q appears twice: the tensors of a pipeline, or of a model with state, need different names",
				status.ErrInvalid, planes[i].Name)
		}
	}
	l, err := place(planes, slots, maxBatch)
	if err != nil {
		return nil, err
	}
	l.Geometry = geometry(strings.Join(tensor.SpecTexts(planes), " "), slots, maxBatch)
	return l.View(sig)
}

// View is the same layout for a peer with the inputs and outputs of sig, which are among
// the planes.
func (l *Layout) View(sig tensor.Signature) (*Layout, error) {
	if err := sig.Validate(); err != nil {
		return nil, err
	}
	v := *l
	v.Signature, v.Ties = sig, sig.Ties()
	find := func(side []tensor.Spec) (planes []Plane, err error) {
		for _, t := range side {
			i := slices.IndexFunc(l.Planes, func(p Plane) bool { return p.Spec.String() == t.String() })
			if i < 0 {
				return nil, fmt.Errorf("%w: the ring has no tensor %s", status.ErrLayout, t)
			}
			planes = append(planes, l.Planes[i])
		}
		return planes, nil
	}
	var err error
	if v.Inputs, err = find(sig.Inputs); err != nil {
		return nil, err
	}
	if v.Outputs, err = find(sig.Outputs); err != nil || len(sig.State) == 0 {
		return &v, err
	}
	both, err := find(StatePlanes(sig.State))
	if err != nil {
		return nil, err
	}
	last := len(sig.State)
	v.State, v.Step = both[:last:last], &both[last]
	for i := range v.State {
		v.State[i].Spec = sig.State[i]
	}
	return &v, nil
}

// place lays out the planes, one after the other, and the board.
func place(specs []tensor.Spec, slots, maxBatch int) (*Layout, error) {
	if slots < 1 || slots > MaxSlots {
		return nil, fmt.Errorf("%w: slots is %d, must be 1..%d", status.ErrInvalid, slots, MaxSlots)
	}
	if maxBatch < 1 || maxBatch > MaxBatchRows {
		return nil, fmt.Errorf("%w: max_batch_size is %d, must be 1..%d", status.ErrInvalid, maxBatch, MaxBatchRows)
	}
	if err := tensor.CheckOneDevice(specs); err != nil {
		return nil, err
	}
	l := &Layout{Slots: slots, MaxBatch: maxBatch, Planes: make([]Plane, len(specs)), PlanesSize: segmentHeader}
	for i, spec := range specs {
		at := &l.PlanesSize
		if spec.OnDevice() {
			at = &l.DeviceSize
		}
		stride := int64(spec.RowBytes())
		l.Planes[i] = Plane{Spec: spec, Offset: *at, Stride: stride}
		if stride > (math.MaxInt64-*at-deviceGrain)/int64(slots) {
			return nil, fmt.Errorf("%w: %d slots of %d bytes do not fit an address space", status.ErrInvalid, slots, stride)
		}
		*at = roundUp(max(*at+stride*int64(slots), 1), pageSize) // not 0, even if all on the device are empty
	}
	l.DeviceSize = roundUp(l.DeviceSize, deviceGrain)

	n := int64(slots)
	l.bellsAt = segmentHeader
	l.wordsAt = roundUp(l.bellsAt+n*cacheLine, pageSize)
	l.recordsAt = roundUp(l.wordsAt+n*8, pageSize)
	l.reasonsAt = roundUp(l.recordsAt+n*64, pageSize)
	l.BoardSize = roundUp(l.reasonsAt+n*reasonBytes, pageSize)
	return l, nil
}

// SlotBytes is the size of one slot's rows in all planes.
func (l *Layout) SlotBytes() int64 {
	var n int64
	for _, p := range l.Planes {
		n += p.Stride
	}
	return n
}

// Row is the memory of a slot's row.
func (p *Plane) Row(planes []byte, slot uint32) []byte {
	p.mustBeOnHost()
	off := p.Offset + int64(slot)*p.Stride
	return planes[off : off+p.Stride : off+p.Stride]
}

// Rows is the memory of n consecutive rows.
func (p *Plane) Rows(planes []byte, slot uint32, n int) []byte {
	p.mustBeOnHost()
	off := p.Offset + int64(slot)*p.Stride
	end := off + int64(n)*p.Stride
	return planes[off:end:end]
}

// mustBeOnHost panics if the plane is in device memory, which Go programs cannot read.
func (p *Plane) mustBeOnHost() {
	if p.Spec.OnDevice() {
		panic(fmt.Errorf("%w: %s lies in device memory: this process has no bytes of it", status.ErrInvalid, p.Spec))
	}
}

func (l *Layout) header(kind Kind, size int64, epoch uint64) header {
	return header{Magic: magic, Version: LayoutVersion, Kind: kind, Size: uint64(size), Epoch: epoch,
		Geometry: l.Geometry, Slots: uint32(l.Slots), MaxBatch: uint32(l.MaxBatch)}
}

// WriteHeader writes the header of a new segment. The broker calls it first.
//
// SYNC POINT "header", release side: it writes the magic last.
func (l *Layout) WriteHeader(s *Segment, kind Kind, epoch uint64) {
	h := l.header(kind, s.Size(), epoch)
	h.Magic = 0
	*at[header](s.mem, 0) = h
	at[atomic.Uint64](s.mem, 0).Store(magic)
}

// CheckHeader checks the header of a received segment. Every peer calls it first.
//
// SYNC POINT "header", acquire side.
func (l *Layout) CheckHeader(s *Segment, kind Kind, epoch uint64) error {
	if s.Size() < segmentHeader {
		return fmt.Errorf("%w: segment of %d bytes has no header", status.ErrLayout, s.Size())
	}
	if at[atomic.Uint64](s.mem, 0).Load() != magic {
		return fmt.Errorf("%w: not a ringbatch segment", status.ErrLayout)
	}
	got := *at[header](s.mem, 0)
	if got.Version != LayoutVersion {
		return fmt.Errorf("%w: segment has version %d, this build speaks %d", status.ErrVersion, got.Version, LayoutVersion)
	}
	if want := l.header(kind, s.Size(), epoch); got != want {
		return fmt.Errorf("%w: header says %+v, expected %+v", status.ErrLayout, got, want)
	}
	return nil
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// geometry is the fingerprint of a layout: FNV-1a 64 over the text below.
func geometry(tensors string, slots, maxBatch int) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "ringbatch %d slots=%d max_batch=%d %s", LayoutVersion, slots, maxBatch, tensors)
	return h.Sum64()
}
