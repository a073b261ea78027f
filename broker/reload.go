// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// Reload applies another configuration, whole or not at all. The policies of known models
// change, and new models appear. Worker processes are replaced one by one and without a
// gap, also after Reload has returned. Sizes, signatures, and models that are no longer
// declared stay. The log names the changes that need a restart.
func (b *Broker) Reload(cfg Config) (err error) {
	b.reloading.Lock()
	defer b.reloading.Unlock()
	if b.isEnding() {
		return status.ErrDraining
	}
	stays, err := b.restartFor(&cfg)
	if err != nil {
		return err
	}
	if err := b.models.checkAliases(cfg.Aliases, cfg.Models); err != nil {
		return err
	}
	if err := checkNames(cfg.Models); err != nil {
		return err
	}
	cfg.GPUMemory = b.cfg.GPUMemory // until a restart
	if err := checkStaffing(&cfg); err != nil {
		return err
	}
	var undo, finish, fresh []func() // fresh: new models take the room that the others leave
	defer func() {
		if err != nil {
			finish, fresh = undo, nil
		}
		for _, f := range append(finish, fresh...) {
			f()
		}
	}()
	named := map[string]bool{}
	for _, mc := range cfg.Models {
		named[mc.Name] = true
		m, mine, err := b.models.reserveName(mc.Name)
		if err != nil {
			return err
		}
		if mine {
			if err := b.makeModel(m, mc); err != nil {
				b.models.abandonModel(m)
				return err
			}
			undo = append(undo, func() {
				b.models.abandonModel(m)
				m.loop.Post(func() { m.loop.ForgetRing(m.ring) })
			})
			fresh = append(fresh, func() {
				b.models.publishModel(m, false)
				b.staff.declare(m, &mc)
				for _, g := range mc.workerGroups() {
					b.super.Add(g)
				}
			})
			continue
		}
		changes, restore, err := b.reloadKnown(m, mc)
		if err != nil {
			b.models.leaveModel(m)
			return err
		}
		stays = append(stays, changes...)
		adopted := b.models.setDynamic(m, false) // true if a worker has declared it before the file
		undo = append(undo, func() {
			restore()
			b.models.setDynamic(m, adopted)
			b.models.leaveModel(m)
		})
		finish = append(finish, func() {
			if adopted {
				m.undeclare() // it is the configuration's now
			}
			b.applyWorkers(b.staff.declare(m, &mc), mc.workerGroups()...)
			b.models.leaveModel(m)
		})
	}
	if err := b.staff.checkReload(cfg.Models, cfg.Workers); err != nil {
		return err
	}
	always := b.staff.declareAlways(cfg.Workers)
	for _, m := range b.models.listModels() {
		if !named[m.name] && !b.models.isDynamic(m) {
			stays = append(stays, m.name+" (no longer named)")
		}
	}
	fresh = append(fresh, func() {
		b.models.putAliases(cfg.Aliases)
		b.applyWorkers(always, supervise.Group{Workers: cfg.Workers})
	})
	if len(stays) > 0 {
		slices.Sort(stays)
		b.log.Warn("configuration: these changes take a restart of the broker", "changes", strings.Join(stays, ", "))
	}
	return nil
}

// applyWorkers starts, replaces and ends processes as the groups declare, after earlier
// calls, and settles x. It does not wait. Only Reload calls it.
func (b *Broker) applyWorkers(x *staffed, groups ...supervise.Group) {
	before, done := b.applied, make(chan struct{})
	b.applied = done
	go func() {
		defer close(done)
		if before != nil {
			<-before
		}
		for _, g := range groups {
			if err := b.super.Apply(context.Background(), g); err != nil && !b.isEnding() {
				b.log.Error("workers could not be changed as the configuration says; those that ran go on", "model", g.Model, "error", err)
			}
		}
		b.staff.settle(x)
	}()
}

// isEnding says whether the broker drains, or ends its clients before that.
func (b *Broker) isEnding() bool { return b.ending.Load() || b.models.isDraining() }

// reloadKnown changes an existing model's policies. stays names changes that need a restart.
func (b *Broker) reloadKnown(m *model, mc ModelConfig) (stays []string, restore func(), err error) {
	p, err := mc.plan()
	if err != nil {
		return nil, nil, fmt.Errorf("model %q: %w", mc.Name, err)
	}
	if mc.shape() != m.shape {
		return nil, nil, fmt.Errorf("%w: %q is %s while it runs; restart the broker to change it",
			status.ErrSignatureMismatch, mc.Name, m.shape)
	}
	var undo []func()
	restore = func() {
		for _, f := range undo {
			f()
		}
	}
	if m.isPipeline {
		stays = ringChanges(mc, m)
	}
	for i := range p.stages {
		changes, back, err := m.reloadStage(m.stages[i], p.stages[i].cfg)
		if err != nil {
			restore()
			return nil, nil, err
		}
		stays, undo = append(stays, changes...), append(undo, back)
	}
	return stays, restore, nil
}

func ringChanges(mc ModelConfig, m *model) (names []string) {
	changed, _ := mc.Policy.Differences(&m.settings, mc.Signature.Inputs) // plan has found no error
	for _, d := range changed {
		if checkStageKeys(policy.Policy{d.Name: d.Asked}) != nil {
			names = append(names, mc.Name+"."+d.Name)
		}
	}
	return names
}

func (m *model) reloadStage(s *stage, mc ModelConfig) (stays []string, restore func(), err error) {
	live, fixed := mc.Policy.Live()
	var was ModelConfig
	err = m.changeStage(s, func(now ModelConfig, settings *policy.Settings) (ModelConfig, error) {
		was, stays = now, nil
		_, before := now.Policy.Live()
		now.Policy = live.Over(before)
		now.Workers = mc.Workers
		changed, _ := fixed.Differences(settings, mc.Signature.Inputs) // plan has found no error
		for _, d := range changed {
			stays = append(stays, mc.Name+"."+d.Name)
		}
		for name := range before {
			if _, kept := fixed[name]; !kept {
				stays = append(stays, mc.Name+"."+name)
			}
		}
		return now, nil
	})
	restore = func() {
		_ = m.changeStage(s, func(ModelConfig, *policy.Settings) (ModelConfig, error) { return was, nil })
	}
	return stays, restore, err
}

// restartFor names the changes outside of models that need a restart.
func (b *Broker) restartFor(cfg *Config) (keys []string, err error) {
	cfg.fill()
	if err := cfg.Limits.fill(cfg.MaxClients, cfg.isShared()); err != nil {
		return nil, err
	}
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
		{"allow", reflect.DeepEqual(cfg.Grants, b.cfg.Grants)},
		{"limits of users and processes", cfg.Limits == b.cfg.Limits},
		{"open_folder", cfg.OpenFolder == b.cfg.OpenFolder},
		{"drain_time", cfg.DrainTime == b.cfg.DrainTime},
		{"max_clients", cfg.MaxClients == b.cfg.MaxClients},
		{"loops", cfg.Loops == b.cfg.Loops},
		{"gpu", maps.Equal(cfg.GPUMemory, b.cfg.GPUMemory)},
		{"mps", cfg.MPS == b.cfg.MPS},
	} {
		if !c.same {
			keys = append(keys, c.key)
		}
	}
	return keys, nil
}
