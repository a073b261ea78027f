// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// Alone runs a model without a broker on full batches in pinned memory, one
// batch per lane: the upper bound of a worker. Each call of run returns when
// one more batch is done. It must be called on the goroutine that called
// Alone, which keeps its thread.
func Alone(m *Model, rows, lanes int) (run func() error, err error) {
	d, err := openDevice(m.options.Device)
	if err != nil {
		return nil, err
	}
	p, err := m.load(d)
	if err != nil {
		return nil, err
	}
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1000, 0, 0, 0)
	layout, err := shm.NewLayout(m.Signature, rows*lanes, rows)
	if err != nil {
		return nil, err
	}
	seg, err := shm.Create("alone", layout.PlanesSize)
	if err != nil {
		return nil, err
	}
	if t := m.Signature.FirstOnDevice(); t != nil {
		return nil, fmt.Errorf("%w: %s: without a broker the tensors lie on the host", status.ErrInvalid, t)
	}
	r, err := openRing(layout, seg, nil)
	if err != nil {
		return nil, fmt.Errorf("register memory with the driver: %w", err)
	}
	all, err := newLanes(d, r, p, lanes, rows)
	if err != nil {
		return nil, err
	}
	next := 0
	return func() error {
		for all[next].batch == nil { // first fill all lanes
			if err := all[next].submit(newOwnRows(layout, next*rows, rows), p); err != nil {
				return err
			}
			next = (next + 1) % lanes
		}
		oldest := all[next]
		for polls := 0; ; polls++ {
			done, err := oldest.done()
			if err != nil {
				return err
			}
			if done {
				break
			}
			pauseAfter(polls)
		}
		next = (next + 1) % lanes
		return oldest.submit(oldest.batch, p)
	}, nil
}

// ownRows is a batch of neighbouring rows.
type ownRows struct {
	layout *shm.Layout
	slots  []uint32
	runs   []worker.Run
}

func newOwnRows(layout *shm.Layout, first, n int) *ownRows {
	b := &ownRows{layout: layout, runs: []worker.Run{{Slot: uint32(first), Rows: n}}}
	for i := range n {
		b.slots = append(b.slots, uint32(first+i))
	}
	return b
}

func (b *ownRows) Rows() int          { return len(b.slots) }
func (b *ownRows) PadTo() int         { return len(b.slots) }
func (b *ownRows) Slots() []uint32    { return b.slots }
func (b *ownRows) Runs() []worker.Run { return b.runs }

func (b *ownRows) RowShape(side, k int) []int {
	if side == 0 {
		return b.layout.Inputs[k].Spec.Shape
	}
	return b.layout.Outputs[k].Spec.Shape
}
