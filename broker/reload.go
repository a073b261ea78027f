package broker

import (
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
)

// Reload takes a configuration read anew into force: the policies of known
// models change, new models appear. Models that it no longer names, sizes and
// signatures stay as they are. It is taken whole or refused whole.
func (b *Broker) Reload(cfg Config) error {
	err := error(shm.ErrDraining)
	b.do(func() { err = b.reload(cfg) })
	return err
}

func (b *Broker) reload(cfg Config) (err error) {
	var undo []func()
	var added []*model
	named := map[string]bool{}
	defer func() {
		if err != nil {
			for _, f := range undo {
				f()
			}
		}
	}()
	for _, mc := range cfg.Models {
		if named[mc.Name] {
			return fmt.Errorf("%w: model %q is declared twice", shm.ErrInvalid, mc.Name)
		}
		named[mc.Name] = true
		m := b.models[mc.Name]
		if m == nil {
			if m, err = b.newModel(mc); err != nil {
				return err
			}
			b.models[mc.Name] = m
			undo = append(undo, func() { delete(b.models, mc.Name); m.close() })
			added = append(added, m)
			continue
		}
		if _, err = mc.fill(); err != nil {
			return err
		}
		if !mc.Signature.Equal(&m.cfg.Signature) {
			return fmt.Errorf("%w: %q is %s while it runs; restart the broker to change it", shm.ErrSignatureMismatch, mc.Name, &m.cfg.Signature)
		}
		before := m.cfg
		next := before
		next.Policy, next.Lease = mc.Policy, mc.Lease
		next.Policy.Buckets = before.Policy.Buckets // clients have laid their inputs out by these
		if err = m.reconfigure(next); err != nil {
			return err
		}
		undo = append(undo, func() { _ = m.reconfigure(before) })
	}
	for _, m := range added { // workers of known models stay as they run
		b.super.startModel(&m.cfg)
	}
	return nil
}
