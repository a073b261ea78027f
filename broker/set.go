// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// set changes a model's policy, whole or not at all.
func (b *Broker) set(name string, p policy.Policy) error {
	if err := p.CheckLive(); err != nil {
		return err
	}
	m, s, err := b.models.takeStage(name)
	if err != nil {
		return err
	}
	defer b.models.leave(m)
	if m.isPipeline() {
		if err := checkStageKeys(p); err != nil {
			return err
		}
	}
	return m.change(s, func(now ModelConfig, settings *policy.Settings) (ModelConfig, error) {
		// With their number, so that the name of a level that is not there makes none.
		now.Policy = p.Over(policy.New(policy.Priorities(settings.LevelCount())).Over(now.Policy))
		return now, nil
	})
}

// change makes another configuration of the present one and takes it into
// force. Texts are read here, not on the loop, however long they are; if
// somebody else was quicker, they are read again.
func (m *model) change(s *stage, edit func(now ModelConfig, settings *policy.Settings) (ModelConfig, error)) error {
	for {
		var now ModelConfig
		var settings policy.Settings
		var seen int
		if !m.do(func() { now, settings, seen = s.cfg, s.settings, s.changes }) {
			return status.ErrDraining
		}
		next, err := edit(now, &settings)
		if err != nil {
			return err
		}
		force, err := next.Policy.Resolve(next.Signature.Inputs)
		if err != nil {
			return err
		}
		again := false
		if !m.do(func() {
			if again = s.changes != seen; !again {
				err = s.reconfigure(next, force)
			}
		}) {
			return status.ErrDraining
		}
		if !again {
			return err
		}
	}
}

// reconfigure takes a new policy into force, or refuses it.
func (s *stage) reconfigure(next ModelConfig, settings policy.Settings) error {
	settings.Slots = s.settings.Slots
	if most := s.most; settings.MaxBatchSize > most {
		return fmt.Errorf("%w: max_batch_size is %d, the ring was made for %d", status.ErrInvalid, settings.MaxBatchSize, most)
	}
	if err := checkPrivate(&settings, s.layout.DeviceSize); err != nil {
		return err
	}
	if err := s.apply(settings); err != nil {
		return err
	}
	s.cfg, s.settings = next, settings
	s.changes++
	s.inForce.Store(&settings)
	s.leaseEnd = s.loop.now // to be looked at anew
	s.log.Info("policy changed", "policy", printable.Text(next.Policy.String(), 1024))
	return nil
}
