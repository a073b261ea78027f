// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// A client may take an answer in parts, while a worker appends to it. The request says so
// (KindStream), and has one row. The worker appends to the row's growing output and shows
// how far it is. If the row runs again, it begins anew as another attempt.
//
//	commit   client   KindStream; keeps the attempt that Shown has, an earlier request's
//	commit   broker   SetStreams
//	take     worker   BeginAttempt, if IsStreamed
//	show     worker   the steps, then Show (SYNC POINT "parts"), then the client's Bell
//	read     client   Shown; copies the steps; Shown again: another attempt may have begun
//
// Shown is steps of the output's first dimension, and the attempt that wrote them:
//
//	63       32 31       0
//	+----------+----------+
//	| attempt  | steps    |
//	+----------+----------+
type Shown uint64

// Attempt is the number of the attempt. It never repeats while a request lasts.
func (s Shown) Attempt() uint32 { return uint32(s >> 32) }

// Steps is how many steps are written. A worker may have written any number.
func (s Shown) Steps() uint32 { return uint32(s) }

// SetStreams says that the client of this generation takes parts.
func (b *Board) SetStreams(slot, gen uint32) { b.bells[slot].streams.Store(gen) }

// IsStreamed reports whether it does.
func (b *Board) IsStreamed(slot, gen uint32) bool { return b.bells[slot].streams.Load() == gen }

// Shown reads what the worker shows.
//
// SYNC POINT "parts", acquire side: the steps are visible.
func (b *Board) Shown(slot uint32) Shown { return Shown(b.bells[slot].shown.Load()) }

// Grows reports whether the steps of Shown are of this output. The last stage of a pipeline
// may have a growing output that is not its client's.
func (b *Board) Grows(slot uint32, p *Plane) bool { return b.bells[slot].plane.Load() == p.page() }

func (p *Plane) page() uint32 { return uint32(p.Offset / pageSize) }

// BeginAttempt takes back what an earlier attempt has shown, before the worker writes.
func (b *Board) BeginAttempt(slot uint32, p *Plane) (attempt uint32) {
	b.bells[slot].plane.Store(p.page())
	attempt = b.Shown(slot).Attempt() + 1
	b.bells[slot].shown.Swap(uint64(attempt) << 32) // a full barrier: a reader that sees a new step sees the new attempt
	return attempt
}

// Show shows that many steps of an attempt. Ring the client's bell afterwards.
//
// SYNC POINT "parts", release side.
func (b *Board) Show(slot, attempt, steps uint32) {
	b.bells[slot].shown.Store(uint64(attempt)<<32 | uint64(steps))
}

// Growing returns the index of the output that grows, and the place of its size in a
// Record's Dims: the first output of which only the first dimension varies. -1 if none does.
func (l *Layout) Growing() (k, dim int) {
	for k := range l.Outputs {
		spec := &l.Outputs[k].Spec
		if len(spec.Variable) == 1 && spec.Variable[0] == 0 && !spec.OnDevice() {
			return k, dim
		}
		dim += len(spec.Variable)
	}
	return -1, 0
}

// StepBytes is the size of one step of the first dimension of a row.
func (p *Plane) StepBytes() int { return p.Spec.RowBytes() / p.Spec.Shape[0] }

// AfterCopy orders a copy of steps before the next Shown.
func (b *Board) AfterCopy() { b.fence.Swap(0) }

// NoGrowing is the reason for a model whose outputs do not grow.
func NoGrowing(sig *tensor.Signature) error {
	return fmt.Errorf("%w: no output of %s can grow: declare one whose first dimension alone varies (text:u8[<=64])", status.ErrInvalid, sig)
}
