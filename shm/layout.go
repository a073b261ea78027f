// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"hash/fnv"
	"math"
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
//	session (one peer and the broker)       what the two tell each other
//
// So a client can write only payload bytes and its own session: it may spoil
// data inside its trust domain, but never another client's progress.
//
// Every segment begins with one page:
//
//	0                                64                        4096
//	+--------------------------------+------------ … ------------+
//	| header                         | words of this kind        |
//	+--------------------------------+------------ … ------------+
type header struct {
	Magic    uint64
	Version  uint32 // checked before anything else is believed
	Kind     Kind
	Size     uint64 // of the whole segment
	Epoch    uint64 // of the broker that made it
	Geometry uint64 // see geometry
	Slots    uint32
	MaxBatch uint32 // rows
	_        [16]byte
}

// magic is "RINGBTCH" read as a little-endian number.
const magic uint64 = 0x484354_42474e4952

// Kind tells what a segment holds.
type Kind uint32

const (
	KindPlanes Kind = iota + 1
	KindBoard
	KindClient
	KindWorker
)

// Plane is where one tensor lives: row i of it, which belongs to slot i, is
// at Offset + i*Stride. Stride is the row's exact size, so that consecutive
// slots are one contiguous tensor.
type Plane struct {
	Spec   tensor.Spec
	Offset int64
	Stride int64
}

// Layout says where everything of a model lies. It follows from the
// signature, the slots and the maximum batch alone, so that every peer
// computes it for itself and compares the fingerprint.
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
//	+--------+
type Layout struct {
	Signature       tensor.Signature
	Slots, MaxBatch int
	Inputs, Outputs []Plane
	PlanesSize      int64
	BoardSize       int64
	Geometry        uint64

	bellsAt, wordsAt, recordsAt, reasonsAt int64
}

// NewLayout computes the layout, or says which limit the model breaks.
func NewLayout(sig tensor.Signature, slots, maxBatch int) (*Layout, error) {
	if err := sig.Validate(); err != nil {
		return nil, err
	}
	if slots < 1 || slots > MaxSlots {
		return nil, fmt.Errorf("%w: slots is %d, must be 1..%d", status.ErrInvalid, slots, MaxSlots)
	}
	if maxBatch < 1 || maxBatch > MaxBatchRows {
		return nil, fmt.Errorf("%w: max_batch_size is %d, must be 1..%d", status.ErrInvalid, maxBatch, MaxBatchRows)
	}
	l := &Layout{Signature: sig, Slots: slots, MaxBatch: maxBatch, Geometry: geometry(&sig, slots, maxBatch)}
	at := int64(segmentHeader)
	place := func(specs []tensor.Spec) ([]Plane, error) {
		planes := make([]Plane, len(specs))
		for i, spec := range specs {
			stride := int64(spec.RowBytes())
			planes[i] = Plane{Spec: spec, Offset: at, Stride: stride}
			if stride > (math.MaxInt64-at-pageSize)/int64(slots) {
				return nil, fmt.Errorf("%w: %d slots of %d bytes do not fit an address space", status.ErrInvalid, slots, stride)
			}
			at = roundUp(at+stride*int64(slots), pageSize)
		}
		return planes, nil
	}
	var err error
	if l.Inputs, err = place(sig.Inputs); err != nil {
		return nil, err
	}
	if l.Outputs, err = place(sig.Outputs); err != nil {
		return nil, err
	}
	l.PlanesSize = at

	n := int64(slots)
	l.bellsAt = segmentHeader
	l.wordsAt = roundUp(l.bellsAt+n*cacheLine, pageSize)
	l.recordsAt = roundUp(l.wordsAt+n*8, pageSize)
	l.reasonsAt = roundUp(l.recordsAt+n*64, pageSize)
	l.BoardSize = roundUp(l.reasonsAt+n*ReasonBytes, pageSize)
	return l, nil
}

// SlotBytes is the payload of one slot over all planes.
func (l *Layout) SlotBytes() int64 {
	var n int64
	for _, p := range l.Inputs {
		n += p.Stride
	}
	for _, p := range l.Outputs {
		n += p.Stride
	}
	return n
}

// Row is the bytes of slot's row in a plane.
func (p *Plane) Row(planes []byte, slot uint32) []byte {
	off := p.Offset + int64(slot)*p.Stride
	return planes[off : off+p.Stride : off+p.Stride]
}

// Rows is the bytes of n consecutive rows.
func (p *Plane) Rows(planes []byte, slot uint32, n int) []byte {
	off := p.Offset + int64(slot)*p.Stride
	end := off + int64(n)*p.Stride
	return planes[off:end:end]
}

func (l *Layout) header(kind Kind, size int64, epoch uint64) header {
	return header{Magic: magic, Version: LayoutVersion, Kind: kind, Size: uint64(size), Epoch: epoch,
		Geometry: l.Geometry, Slots: uint32(l.Slots), MaxBatch: uint32(l.MaxBatch)}
}

// WriteHeader is the broker's first write into a new segment.
//
// SYNC POINT "header", release side: the magic goes last.
func (l *Layout) WriteHeader(s *Segment, kind Kind, epoch uint64) {
	h := l.header(kind, s.Size(), epoch)
	h.Magic = 0
	*at[header](s.mem, 0) = h
	at[atomic.Uint64](s.mem, 0).Store(magic)
}

// CheckHeader is every peer's first read of a segment it was given.
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

// geometry is the fingerprint of everything that the layout of a model's
// segments depends on: FNV-1a 64 over the text below.
func geometry(s *tensor.Signature, slots, maxBatch int) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "ringbatch %d slots=%d max_batch=%d %s", LayoutVersion, slots, maxBatch, s)
	return h.Sum64()
}
