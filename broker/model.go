// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// model is a ring with one stage, under a name, and the loop that serves it.
// It lives in the registry.
type model struct {
	name      string
	signature string // of the ring, as text
	loop      *loop
	ring      *ring
	stage     *stage

	undeclare func() // no longer counts for the user whose worker declared it

	// Under the registry's lock:
	made    chan struct{} // closed when it is no longer being made; see registry
	dynamic bool          // declared by a worker: goes with its last session
	users   int           // sessions, and those who are about to have one
}

// build makes the ring and the stage, away from any loop.
func (m *model) build(b *Broker, cfg ModelConfig) error {
	settings, layout, err := cfg.Resolve()
	if err != nil {
		return err
	}
	bat, err := batcher.New(settings)
	if err != nil {
		return fmt.Errorf("model %q: %w", cfg.Name, err)
	}
	r, err := newRing(cfg.Name, layout, b.cfg.Memory, b.epoch, b.log.With("model", cfg.Name))
	if err != nil {
		return err
	}
	r.limits = b.cfg.Limits
	r.vacated = func() { b.models.leave(m) }
	r.stage = newStage(r, cfg, settings, bat)
	m.ring, m.stage, m.signature = r, r.stage, layout.Signature.String()
	r.log.Info("model ready", "signature", layout.Signature.String(), "slots", layout.Slots,
		"max_batch_size", settings.MaxBatchSize, "wait_time", settings.WaitTime, "bytes", layout.PlanesSize)
	return nil
}

// maxWindow is the most slots that one client may have: what the policy says, or
// seven eighths of a ring that is not small, so that something is left for others. More than
// largeWindow only if a single batch has it: taking a window and giving it back
// takes time.
func (m *model) maxWindow() int {
	l, most := m.ring.layout, m.stage.inForce.Load().MaxWindow
	if most == 0 {
		most = l.Slots
		if l.Slots > smallRing {
			most -= l.Slots / 8
		}
	}
	return min(max(most, l.MaxBatch), max(largeWindow, l.MaxBatch))
}

const (
	largeWindow = 1 << 16
	smallRing   = 2 * defaultWindow
)

// checkWindow refuses a window that is larger than one client may have.
func (m *model) checkWindow(window int) error {
	if most := m.maxWindow(); window > most && window <= m.ring.layout.Slots {
		return fmt.Errorf("%w: a window of %d slots; one client of %q may have %d (max_window), the ring has %d", status.ErrQuota, window, m.name, most, m.ring.layout.Slots)
	}
	return nil
}

// serveOn says which loop the model belongs to, before anybody can reach it.
func (m *model) serveOn(l *loop) { m.loop, m.ring.loop, m.stage.loop = l, l, l }

// do runs f on the model's loop, if the model is still there.
func (m *model) do(f func()) bool {
	there := false
	return m.loop.do(func() {
		if there = !m.ring.closed; there {
			f()
		}
	}) && there
}

// policy is the model's in force, as text. It is written away from the loop:
// lists may be long.
func (m *model) policy() policy.Policy {
	return m.stage.inForce.Load().Policy(m.ring.layout.Signature.Inputs)
}

// line is the model as OpModels lists it, but for who is attached.
func (m *model) line() control.Model {
	sig := &m.ring.layout.Signature
	return control.Model{Name: m.name, Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs), Policy: m.policy()}
}
