// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// model is a named ring with its stages, and the loop that serves it.
type model struct {
	name       string
	signature  string // of the ring, as text
	shape      string // see ModelConfig.shape
	loop       *engine.Loop
	ring       *engine.Ring
	stages     []*stage    // of the ring
	layout     *shm.Layout // of the ring
	log        *slog.Logger
	isPipeline bool
	onDemand   atomic.Bool     // it has no workers, and a request starts some
	declared   ModelConfig     // as it was made
	settings   policy.Settings // of a pipeline: the ring's, and the stages' common ones

	undeclare func() // ends the count of the model for the user that declared it

	// Under the registry's lock:
	made    chan struct{} // closed when the model is made or abandoned; then nil
	dynamic bool          // declared by a worker: goes with its last session, unless group has a process for it
	group   string        // of its last worker, as supervise.Supervisor.GroupOf
	users   int           // sessions, and other holders; see registry
}

// stage is a stage of a model's ring, and its declaration.
type stage struct {
	*engine.Stage
	log      *slog.Logger
	changing sync.Mutex // held while cfg changes, also while its loop is asked
	cfg      ModelConfig
}

// buildRing makes the ring and its stages, away from any loop.
func (m *model) buildRing(b *Broker, cfg ModelConfig) error {
	p, err := cfg.plan()
	if err != nil {
		return fmt.Errorf("model %q: %w", cfg.Name, err)
	}
	if err := checkRing(cfg.Name, p.layout); err != nil {
		return err
	}
	m.layout, m.settings, m.signature, m.shape = p.layout, p.settings, p.layout.Signature.String(), cfg.shape()
	m.log, m.isPipeline, m.declared = b.log.With("model", cfg.Name), len(cfg.Stages) > 0, cfg
	spec := engine.RingSpec{
		Name: cfg.Name, Layout: p.layout, Create: b.cfg.create, Epoch: b.epoch, UserShare: b.cfg.Limits.UserShare, Log: m.log,
		Pipeline: m.isPipeline, SessionEnded: func() { b.models.leaveModel(m) },
	}
	for i := range p.stages {
		s := &p.stages[i]
		spec.Stages = append(spec.Stages, engine.StageSpec{Name: s.cfg.Name, Settings: s.settings, Layout: s.layout, Dims: s.dims})
	}
	if m.ring, err = engine.NewRing(&spec); err != nil {
		return err
	}
	for i, es := range m.ring.Stages() {
		s := &stage{Stage: es, log: m.log, cfg: p.stages[i].cfg}
		if m.isPipeline {
			s.log = m.log.With("stage", s.Name())
		}
		m.stages = append(m.stages, s)
		s.log.Info("model ready", "signature", s.Signature().String(), "slots", p.layout.Slots,
			"max_batch_size", s.InForce().MaxBatchSize, "wait_time", s.policy()["wait_time"], "bytes", p.layout.PlanesSize)
	}
	return nil
}

// inForce is the policy as clients see it. A pipeline's has the settings that its stages
// share, and the most rows that all of them take.
func (m *model) inForce() *policy.Settings {
	if !m.isPipeline {
		return m.stages[0].InForce()
	}
	all := m.settings
	for i, s := range m.stages {
		if n := s.InForce().MaxBatchSize; i == 0 || n < all.MaxBatchSize {
			all.MaxBatchSize = n
		}
	}
	all.PreferredBatchSizes = nil // each stage has its own
	return &all
}

// isStaffed says that each stage has a worker. Any goroutine may call it.
func (m *model) isStaffed() bool {
	return !slices.ContainsFunc(m.stages, func(s *stage) bool { return !s.IsStaffed() })
}

// maxWindow is the most slots that one client may have: max_window, or seven eighths of a
// ring that is not small. A window above largeWindow takes long to reset, so it is allowed
// only if a batch is that large.
func (m *model) maxWindow() int {
	l, most := m.layout, m.inForce().MaxWindow
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
	smallRing   = 2 * engine.DefaultWindow
)

func (m *model) checkWindow(window int) error {
	if most := m.maxWindow(); window > most && window <= m.layout.Slots {
		return fmt.Errorf("%w: a window of %d slots; one client of %q may have %d (max_window), the ring has %d",
			status.ErrQuota, window, m.name, most, m.layout.Slots)
	}
	return nil
}

// policy is the policy in force as text, which may be long: no loop calls it.
func (m *model) policy() policy.Policy {
	return m.inForce().Policy(m.layout.Signature.Inputs)
}

func (m *model) listLine() control.Model {
	sig := &m.layout.Signature
	line := control.Model{Name: m.name, Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs),
		State: tensor.SpecTexts(sig.State), Policy: m.policy()}
	if m.isPipeline {
		line.Stages = m.stageNames()
	}
	return line
}
