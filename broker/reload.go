package broker

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
)

// Reload takes a configuration read anew into force: the policies of known
// models change, new models appear. Models that it no longer names, sizes and
// signatures stay as they are; what would take a restart is named in the log.
// It is taken whole or refused whole.
func (b *Broker) Reload(cfg Config) error {
	err := error(status.ErrDraining)
	b.do(func() { err = b.reload(cfg) })
	return err
}

func (b *Broker) reload(cfg Config) (err error) {
	if b.draining { // new workers would have nothing to do
		return status.ErrDraining
	}
	var undo []func()
	var added []*model
	named := map[string]bool{}
	stays, err := b.restartFor(&cfg)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			for _, f := range undo {
				f()
			}
		}
	}()
	for _, mc := range cfg.Models {
		if named[mc.Name] {
			return fmt.Errorf("%w: model %q is declared twice", status.ErrInvalid, mc.Name)
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
		slots := mc.Slots
		if _, err = mc.fill(); err != nil {
			return err
		}
		if !mc.Signature.Equal(&m.cfg.Signature) {
			return fmt.Errorf("%w: %q is %s while it runs; restart the broker to change it", status.ErrSignatureMismatch, mc.Name, &m.cfg.Signature)
		}
		before := m.cfg
		next := before
		next.Policy, next.Lease = mc.Policy, mc.Lease
		next.Policy.Buckets = before.Policy.Buckets // clients have laid their inputs out by these
		if m.dynamic {                              // a worker was quicker than the file, which is new to it all the same
			next.Workers = mc.Workers
			added = append(added, m)
		} else if !reflect.DeepEqual(mc.Workers, m.cfg.Workers) {
			stays = append(stays, mc.Name+".worker")
		}
		if slots != 0 && slots != m.cfg.Slots {
			stays = append(stays, mc.Name+".slots")
		}
		if !slices.EqualFunc(mc.Policy.Buckets, before.Policy.Buckets, slices.Equal) {
			stays = append(stays, mc.Name+".buckets")
		}
		if err = m.reconfigure(next); err != nil {
			return err
		}
		undo = append(undo, func() { _ = m.reconfigure(before) })
	}
	if len(added) > 0 {
		b.changes.note()
	}
	for _, m := range added { // workers of known models stay as they run
		m.dynamic = false
		b.super.Add(supervise.Group{Model: m.cfg.Name, Workers: m.cfg.Workers})
	}
	for name, m := range b.models {
		if !named[name] && !m.dynamic {
			stays = append(stays, name+" (no longer named)")
		}
	}
	if len(stays) > 0 {
		slices.Sort(stays)
		b.log.Warn("configuration: these changes take a restart of the broker", "changes", strings.Join(stays, ", "))
	}
	return nil
}

// restartFor names what a configuration changes besides its models.
func (b *Broker) restartFor(cfg *Config) (keys []string, err error) {
	cfg.fill()
	cfg.Workers = slices.Clone(cfg.Workers)
	for i := range cfg.Workers {
		if err := cfg.Workers[i].Fill(); err != nil {
			return nil, err
		}
	}
	for _, c := range []struct {
		key  string
		same bool
	}{
		{"socket", cfg.Socket == b.cfg.Socket},
		{"allow_uids", slices.Equal(cfg.AllowedUIDs, b.cfg.AllowedUIDs)},
		{"open_folder", cfg.OpenFolder == b.cfg.OpenFolder},
		{"drain_time", cfg.DrainTime == b.cfg.DrainTime},
		{"max_clients", cfg.MaxClients == b.cfg.MaxClients},
		{"mps", cfg.MPS == b.cfg.MPS},
		{"worker", slices.EqualFunc(cfg.Workers, b.cfg.Workers, func(x, y supervise.Worker) bool { return reflect.DeepEqual(x, y) })},
	} {
		if !c.same {
			keys = append(keys, c.key)
		}
	}
	return keys, nil
}
