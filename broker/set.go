// SPDX-License-Identifier: Apache-2.0

package broker

import (
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
	if m.isPipeline {
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
// force. Texts are read here, not on the loop, however long they are.
func (m *model) change(s *stage, edit func(now ModelConfig, settings *policy.Settings) (ModelConfig, error)) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	next, err := edit(s.cfg, s.InForce())
	if err != nil {
		return err
	}
	force, err := next.Policy.Resolve(next.Signature.Inputs)
	if err != nil {
		return err
	}
	if !m.ring.Do(func() { err = s.SetPolicy(force) }) {
		return status.ErrDraining
	}
	if err != nil {
		return err
	}
	s.cfg = next
	s.log.Info("policy changed", "policy", printable.Text(next.Policy.String(), 1024))
	return nil
}
