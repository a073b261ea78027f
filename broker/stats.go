// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"os"
	"time"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/status"
)

// Snapshot is the present state, as `ringbatch stats` shows it. It may be
// called from any goroutine while Serve runs; after that it has no models.
// Every model is asked for itself, so that no loop is held up by others', and
// a loop does no more than copy: the arithmetic is done here.
func (b *Broker) Snapshot() stats.Broker {
	s := b.snapshotSelf()
	for _, m := range b.models.list() {
		s.Models = append(s.Models, b.snapshotModel(m)...)
	}
	return s
}

// snapshotSelf is a Snapshot without the models.
func (b *Broker) snapshotSelf() stats.Broker {
	s := stats.Broker{
		Pid: os.Getpid(), Socket: b.cfg.Socket, Epoch: b.epoch, UptimeS: time.Since(b.started).Seconds(), Draining: b.models.drains(),
		Models: []stats.Model{}, Loops: []stats.Loop{},
	}
	for _, a := range b.models.listAliases() {
		line := stats.Alias{Name: a.Name}
		for _, t := range a.To {
			line.To = append(line.To, stats.AliasTarget{Model: t.Model, SharePercent: alias.Share(t.Share).Percent(), Clients: t.Clients})
		}
		s.Aliases = append(s.Aliases, line)
	}
	for _, l := range b.loops {
		if work, ok := l.Snapshot(); ok {
			s.Loops = append(s.Loops, work)
		}
	}
	s.Processes, s.MPS = b.super.Snapshot()
	return s
}

// snapshotModel is a line for a model, or none if it is gone. A pipeline has one
// for the whole, as its clients see it, and then one for each stage.
func (b *Broker) snapshotModel(m *model) []stats.Model {
	lines, whole, ok := m.ring.Snapshot()
	if !ok {
		return nil
	}
	for i := range lines {
		for k := range lines[i].Workers {
			w := &lines[i].Workers[k]
			w.Restarts = max(w.Restarts, b.super.Restarts(w.Pid))
		}
	}
	if m.isPipeline {
		lines = append([]stats.Model{m.sum(whole, lines)}, lines...)
	}
	return lines
}

// batchesSince are the batches of a model after the first ones, as far as they are
// remembered.
func (b *Broker) batchesSince(name string, since uint64) (stats.Batches, error) {
	m, s, err := b.models.takeStage(name)
	if err != nil {
		return stats.Batches{}, err
	}
	defer b.models.leave(m)
	out, ok := s.BatchesSince(since)
	if !ok {
		return out, fmt.Errorf("%w: %q", status.ErrUnknownModel, name)
	}
	return out, nil
}

// trace records a model for a time, or until over is closed.
func (b *Broker) trace(name string, d time.Duration, over <-chan struct{}) (stats.Trace, error) {
	m, s, err := b.models.takeStage(name)
	if err != nil {
		return stats.Trace{}, err
	}
	defer b.models.leave(m)
	return s.Trace(d, over)
}
