package broker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// set changes a model's policy, whole or not at all.
func (b *Broker) set(name string, p policy.Policy) error {
	if err := p.CheckLive(); err != nil {
		return err
	}
	m, err := b.models.take(name)
	if err != nil {
		return err
	}
	defer b.models.leave(m)
	if !m.do(func() {
		next := m.stage.cfg
		// With their number, so that the name of a level that is not there makes none.
		next.Policy = p.Over(policy.New(policy.Priorities(m.stage.settings.LevelCount())).Over(next.Policy))
		err = m.stage.reconfigure(next)
	}) {
		return status.ErrDraining
	}
	return err
}

// reconfigure takes a new policy into force, or refuses it.
func (s *stage) reconfigure(next ModelConfig) error {
	settings, err := next.Policy.Resolve(next.Signature.Inputs)
	if err != nil {
		return err
	}
	settings.Slots = s.settings.Slots
	if most := s.ring.layout.MaxBatch; settings.MaxBatchSize > most {
		return fmt.Errorf("%w: max_batch_size is %d, the ring was made for %d", status.ErrInvalid, settings.MaxBatchSize, most)
	}
	if err := s.apply(settings); err != nil {
		return err
	}
	s.cfg, s.settings = next, settings
	s.leaseEnd = s.loop.now // to be looked at anew
	s.log.Info("policy changed", "policy", next.Policy.String())
	return nil
}
