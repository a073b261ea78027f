// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"slices"

	"github.com/ringbatch/ringbatch/tensor"
)

// A sequence is a slot that its client keeps. For each state tensor the slot's row has
// two halves: a step reads one and writes the other. The client changes halves if, and
// only if, the step was answered well. So a step that fails, expires, is canceled or
// loses its worker leaves the state as it was.
//
// The client writes a Step into each row of the request before it commits, as it writes
// inputs. The broker only counts fresh rows; mails know nothing of it.
//
//	state h:f32[64]      plane h:f32[2,64]
//	Step                 plane @step:u8[64], of which byte 0 is used
type Step uint8

const (
	StepOdd   Step = 1 << iota // the step reads half 1 and writes half 0
	StepFresh                  // the state that the step reads is zero
)

// stepPlane has a cache line for each slot: clients do not share lines.
var stepPlane = tensor.Spec{Name: "@step", DType: tensor.U8, Shape: []int{64}}

// StatePlanes are the planes that a model with this state has after its inputs and outputs.
func StatePlanes(state []tensor.Spec) []tensor.Spec {
	if len(state) == 0 {
		return nil
	}
	planes := slices.Clone(state)
	for i := range planes {
		planes[i].Shape = append([]int{2}, state[i].Shape...)
	}
	return append(planes, stepPlane)
}

// StateBytes is the size of the states of all slots.
func (l *Layout) StateBytes() (n int64) {
	for i := range l.State {
		n += l.State[i].Stride * int64(l.Slots)
	}
	return n
}

// Half is the half of a row that a step reads: 0 or 1.
func (s Step) Half() int { return int(s & StepOdd) }

// ReadStep is the word of a slot. A client may have written any byte.
func (l *Layout) ReadStep(planes []byte, slot uint32) Step {
	return Step(l.Step.Row(planes, slot)[0]) & (StepOdd | StepFresh)
}

// WriteStep sets the word of a slot, before its request is committed.
func (l *Layout) WriteStep(planes []byte, slot uint32, s Step) {
	l.Step.Row(planes, slot)[0] = byte(s)
}

// HalfRow is one half of a slot's row of the k-th state, in host memory.
func (l *Layout) HalfRow(planes []byte, k int, slot uint32, half int) []byte {
	row := l.State[k].Row(planes, slot)
	n := len(row) / 2
	return row[half*n : (half+1)*n : (half+1)*n]
}
