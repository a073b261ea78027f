// SPDX-License-Identifier: Apache-2.0

package worker

import "github.com/ringbatch/ringbatch/shm"

// State is the k-th state as this step finds it, not to be written; zero in fresh rows.
func (b *Batch) State(k int) Column { return b.column(b.w.session.Layout.State, k, state) }

// NextState is the k-th state for the next step, which the worker writes.
func (b *Batch) NextState(k int) Column { return b.column(b.w.session.Layout.State, k, nextState) }

// Fresh reports whether a row begins its sequence.
func (b *Batch) Fresh(row int) bool { return row < len(b.steps) && b.steps[row]&shm.StepFresh != 0 }

// readSteps reads each row's Step, and zeroes the states on the host that fresh rows read.
func (b *Batch) readSteps() {
	layout, planes := b.w.session.Layout, b.w.session.Planes.Bytes()
	if b.steps = b.steps[:0]; layout.Step == nil {
		return
	}
	for _, slot := range b.slots {
		s := layout.ReadStep(planes, slot)
		b.steps = append(b.steps, s)
		for k := range layout.State {
			if s&shm.StepFresh != 0 && !layout.State[k].Spec.OnDevice() {
				clear(layout.HalfRow(planes, k, slot, s.Half()))
			}
		}
	}
}
