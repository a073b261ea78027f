// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"hash/fnv"
	"strings"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// A weights segment has the tensors of a model in weightBuffers versions at a time. One
// publisher writes them, workers follow:
//
//	0      64         128                  16512           20480
//	+------+----------+--------------------+-------- … ----+----------+----------+ …
//	|header| words    | followerWords × 256| reason        | buffer 0 | buffer 1 |
//	+------+----------+--------------------+-------- … ----+----------+----------+ …
//
// A version is current from the moment at which its publisher stores the word Current.
// A follower says which buffer it reads before it reads, and then looks at Current again.
// So a publisher that finds a buffer neither current, nor good, nor in use may write it:
// no lock, and a peer that dies blocks no other.
//
// If the tensors are in device memory, the buffers are there, one after the other from
// byte 0, in memory that the first publisher allocates. The segment then ends with the reason.
const (
	weightBuffers    = 4
	WeightFollowers  = 256
	maxWeightTensors = 4096

	weightReasonBytes = 1024
	weightWordsAt     = 64
	followersAt       = 128
	weightReasonAt    = followersAt + 64*WeightFollowers
	weightDataAt      = 20480
)

type weightWords struct {
	// Written by the publisher.
	Current   atomic.Uint64 // a version and its buffer; 0: none
	Good      atomic.Uint64 // the one before that was not refused
	Last      atomic.Uint32 // the latest version that was ever published
	_         uint32
	Published atomic.Int64 // when, on Now's clock
	// Written by whoever refuses a version.
	Refused   [weightBuffers]atomic.Uint32 // the latest version of each buffer that was refused; it never falls
	Reasoned  atomic.Uint32                // the latest version whose reason a peer writes, or has written
	ReasonLen atomic.Uint32
	_         [8]byte
}

type followerWords struct {
	InUse  atomic.Uint32 // 1 + the buffer that the follower reads; 0: none
	Loaded atomic.Uint32 // the version that it has loaded last
	_      [56]byte
}

// WeightsLayout is the layout of a weights segment.
type WeightsLayout struct {
	Tensors    []tensor.Spec
	Offsets    []int64 // of each tensor in a buffer
	Bytes      int64   // of a buffer
	Size       int64   // of the segment
	DeviceSize int64   // of the device memory with the buffers; 0: they are in the segment
	Geometry   uint64
}

// NewWeightsLayout places the tensors one after the other, each on a multiple of 64.
func NewWeightsLayout(tensors []tensor.Spec) (*WeightsLayout, error) {
	if len(tensors) < 1 || len(tensors) > maxWeightTensors {
		return nil, fmt.Errorf("%w: weights of %d tensors, want 1..%d", status.ErrInvalid, len(tensors), maxWeightTensors)
	}
	l := &WeightsLayout{Tensors: tensors}
	names := map[string]bool{}
	for _, t := range tensors {
		if names[t.Name] || len(t.Variable) > 0 || t.RowElems() == 0 || t.Memory != tensors[0].Memory {
			return nil, fmt.Errorf("%w: the weight %s: each needs its own name, a fixed shape with elements, and the memory that all have",
				status.ErrInvalid, t)
		}
		names[t.Name] = true
		l.Offsets = append(l.Offsets, l.Bytes)
		if l.Bytes = roundUp(l.Bytes+int64(t.RowBytes()), cacheLine); l.Bytes > maxWeightBytes {
			return nil, fmt.Errorf("%w: weights of more than %d bytes", status.ErrInvalid, int64(maxWeightBytes))
		}
	}
	l.Bytes = roundUp(l.Bytes, pageSize)
	if l.Size = weightDataAt; tensors[0].OnDevice() {
		l.DeviceSize = roundUp(weightBuffers*l.Bytes, deviceGrain)
	} else {
		l.Size += weightBuffers * l.Bytes
	}
	h := fnv.New64a()
	fmt.Fprintf(h, "ringbatch weights %d %s", LayoutVersion, strings.Join(tensor.SpecTexts(tensors), " "))
	l.Geometry = h.Sum64()
	return l, nil
}

const maxWeightBytes = 1 << 40

// Weights is the typed view of a weights segment.
type Weights struct {
	*WeightsLayout
	seg       *Segment
	words     *weightWords
	followers []followerWords
}

func (l *WeightsLayout) header(epoch uint64) header {
	return header{Magic: magic, Version: LayoutVersion, Kind: kindWeights, Size: uint64(l.Size), Epoch: epoch, Geometry: l.Geometry,
		Slots: weightBuffers, MaxBatch: WeightFollowers}
}

// CreateWeights makes a segment without a version, for the broker.
func CreateWeights(l *WeightsLayout, epoch uint64) (*Weights, error) {
	seg, err := Create("weights", l.Size)
	if err != nil {
		return nil, err
	}
	h := l.header(epoch)
	h.Magic = 0
	*at[header](seg.mem, 0) = h
	at[atomic.Uint64](seg.mem, 0).Store(magic) // SYNC POINT "header"
	return viewWeights(l, seg), nil
}

func viewWeights(l *WeightsLayout, seg *Segment) *Weights {
	return &Weights{
		WeightsLayout: l, seg: seg, words: at[weightWords](seg.mem, weightWordsAt),
		followers: array[followerWords](seg.mem, followersAt, WeightFollowers),
	}
}

// Segment is the memory.
func (w *Weights) Segment() *Segment { return w.seg }

func splitWord(word uint64) (v uint32, buffer int) {
	return uint32(word >> 8), int(word & 0xff % weightBuffers)
}

// inForce is the word that followers use: Current, or Good if Current was refused; 0 if both were.
func (w *Weights) inForce() uint64 {
	for _, word := range []*atomic.Uint64{&w.words.Current, &w.words.Good} {
		c := word.Load()
		if w.stands(c) {
			return c
		}
	}
	return 0
}

// InForce is the version that followers use now, and when the latest was published, on Now's clock.
func (w *Weights) InForce() (v uint32, published int64) {
	v, _ = splitWord(w.inForce())
	return v, w.words.Published.Load()
}

// Last is the latest version that was ever published.
func (w *Weights) Last() uint32 { return w.words.Last.Load() }

// Loaded is the version that a follower has loaded last.
func (w *Weights) Loaded(follower int) uint32 { return w.followers[follower].Loaded.Load() }

// ForgetFollower frees the words of a follower that is gone.
func (w *Weights) ForgetFollower(follower int) {
	w.followers[follower].InUse.Store(0)
	w.followers[follower].Loaded.Store(0)
}

// stands reports whether a version was not refused.
func (w *Weights) stands(word uint64) bool {
	v, b := splitWord(word)
	return v > w.words.Refused[b].Load()
}

// Continue makes the next version one after those of another segment.
func (w *Weights) Continue(from *Weights) {
	w.words.Last.Store(max(w.words.Last.Load(), from.words.Last.Load()))
}

// Withdraw refuses the current version if it is v.
func (w *Weights) Withdraw(v uint32, reason string) bool {
	now, b := splitWord(w.words.Current.Load())
	return now == v && w.Refuse(v, b, reason)
}

// Refuse withdraws a version that was published in this buffer: followers use the one
// before. It returns false if the version was refused before.
func (w *Weights) Refuse(v uint32, buffer int, reason string) bool {
	refused := w.words.Refused[buffer].Load()
	if refused >= v {
		return false
	}
	// If several peers refuse it at once, one of them gives the reason.
	if r := w.words.Reasoned.Load(); r < v && w.words.Reasoned.CompareAndSwap(r, v) {
		w.words.ReasonLen.Store(0)
		n := copy(w.seg.mem[weightReasonAt:weightReasonAt+weightReasonBytes], reason)
		w.words.ReasonLen.Store(uint32(n))
	}
	return w.words.Refused[buffer].CompareAndSwap(refused, v)
}

// Refused is the latest version that was refused, and the reason.
func (w *Weights) Refused() (v uint32, reason string) {
	for b := range w.words.Refused {
		v = max(v, w.words.Refused[b].Load())
	}
	n := min(w.words.ReasonLen.Load(), weightReasonBytes)
	return v, string(w.seg.mem[weightReasonAt : weightReasonAt+int(n)])
}
