// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// model is a ring with its stages, one unless it is a pipeline, under a name, and
// the loop that serves it. It lives in the registry.
type model struct {
	name      string
	signature string // of the ring, as text
	shape     string // what must agree where it is declared again
	loop      *loop
	ring      *ring
	settings  policy.Settings // of a pipeline: those of the ring, and what stages have in common

	undeclare func() // no longer counts for the user whose worker declared it

	// Under the registry's lock:
	made    chan struct{} // closed when it is no longer being made; see registry
	dynamic bool          // declared by a worker: goes with its last session
	users   int           // sessions, and those who are about to have one
}

// build makes the ring and its stages, away from any loop.
func (m *model) build(b *Broker, cfg ModelConfig) error {
	p, err := cfg.plan()
	if err != nil {
		return fmt.Errorf("model %q: %w", cfg.Name, err)
	}
	batchers := make([]*auto.Batcher, len(p.stages))
	for i := range p.stages {
		if batchers[i], err = auto.NewBatcher(p.stages[i].settings); err != nil {
			return fmt.Errorf("model %q: %w", p.stages[i].cfg.Name, err)
		}
	}
	if err := b.checkRing(cfg.Name, p.layout); err != nil {
		return err
	}
	r, err := newRing(cfg.Name, p.layout, b.cfg.Memory, b.epoch, b.log.With("model", cfg.Name))
	if err != nil {
		return err
	}
	r.limits = b.cfg.Limits
	r.vacated = func() { b.models.leave(m) }
	if r.isPipeline = len(cfg.Stages) > 0; r.isPipeline {
		r.whole = &stageStats{}
		r.whole.init(0)
	}
	for i := range p.stages {
		s := newStage(r, &p.stages[i], batchers[i])
		if i > 0 {
			r.stages[i-1].next = s
		}
		r.stages = append(r.stages, s)
		s.log.Info("model ready", "signature", s.layout.Signature.String(), "slots", p.layout.Slots,
			"max_batch_size", s.settings.MaxBatchSize, "wait_time", s.policy()["wait_time"], "bytes", p.layout.PlanesSize)
	}
	m.ring, m.settings, m.signature, m.shape = r, p.settings, p.layout.Signature.String(), cfg.shape()
	return nil
}

// inForce is the policy as clients see it. That of a pipeline is what its stages
// have in common, with the rows that all of them take.
func (m *model) inForce() *policy.Settings {
	if !m.isPipeline() {
		return m.ring.stages[0].inForce.Load()
	}
	all := m.settings
	for i, s := range m.ring.stages {
		if n := s.inForce.Load().MaxBatchSize; i == 0 || n < all.MaxBatchSize {
			all.MaxBatchSize = n
		}
	}
	all.PreferredBatchSizes = nil // of the stages; those of the pipeline might not fit
	return &all
}

// staffed says, to any goroutine, that each stage has a worker.
func (m *model) staffed() bool {
	return !slices.ContainsFunc(m.ring.stages, func(s *stage) bool { return !s.staffed.Load() })
}

// maxWindow is the most slots that one client may have: what the policy says, or
// seven eighths of a ring that is not small, so that something is left for others. More than
// largeWindow only if a single batch has it: taking a window and giving it back
// takes time.
func (m *model) maxWindow() int {
	l, most := m.ring.layout, m.inForce().MaxWindow
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
func (m *model) serveOn(l *loop) {
	m.loop, m.ring.loop = l, l
	for _, s := range m.ring.stages {
		s.loop = l
	}
}

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
	return m.inForce().Policy(m.ring.layout.Signature.Inputs)
}

// line is the model as OpModels lists it, but for who is attached.
func (m *model) line() control.Model {
	sig := &m.ring.layout.Signature
	line := control.Model{Name: m.name, Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs), Policy: m.policy()}
	if m.isPipeline() {
		line.Stages = m.stageNames()
	}
	return line
}
