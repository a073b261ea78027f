// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"os"
	"time"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// Snapshot is the present state, as `ringbatch stats` shows it. Any goroutine may call it.
// Each model is asked by itself, so that its loop does not wait for others.
func (b *Broker) Snapshot() stats.Broker {
	s := stats.Broker{
		Pid: os.Getpid(), Socket: b.cfg.Socket, Epoch: b.epoch, UptimeS: time.Since(b.started).Seconds(),
		Draining: b.models.isDraining(), Models: []stats.Model{}, Loops: []stats.Loop{},
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
	s.Weights = b.weights.snapshot()
	staffing := b.staff.snapshot()
	for _, m := range b.models.listModels() {
		s.Models = append(s.Models, b.snapshotModel(m, staffing[m])...)
	}
	return s
}

// snapshotModel is the lines of a model: of a pipeline, the whole and each stage.
func (b *Broker) snapshotModel(m *model, staffing *stats.Staffing) []stats.Model {
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
		lines = append([]stats.Model{m.sumStages(whole, lines)}, lines...)
	}
	if lines[0].Staffing = staffing; staffing.IsAsleep() {
		for i := range lines {
			lines[i].NotReady = ""
		}
	}
	return lines
}

func (b *Broker) batchesSince(name string, since uint64) (stats.Batches, error) {
	m, s, err := b.models.takeStage(name)
	if err != nil {
		return stats.Batches{}, err
	}
	defer b.models.leaveModel(m)
	out, ok := s.BatchesSince(since)
	if !ok {
		return out, fmt.Errorf("%w: %q", status.ErrUnknownModel, name)
	}
	return out, nil
}

func (b *Broker) traceModel(name string, d time.Duration, over <-chan struct{}) (stats.Trace, error) {
	m, s, err := b.models.takeStage(name)
	if err != nil {
		return stats.Trace{}, err
	}
	defer b.models.leaveModel(m)
	return s.Trace(d, over)
}

func (b *Broker) listModels() (list []control.Model) {
	staffing := b.staff.snapshot()
	for _, m := range b.models.listModels() {
		clients, stages, ok := m.ring.Readiness()
		if !ok {
			continue
		}
		line := m.listLine()
		line.Clients = clients
		for i, s := range stages { // a model is as ready as its least ready stage
			line.Workers += s.Attached
			if i == 0 || s.Ready < line.ReadyWorkers {
				line.ReadyWorkers = s.Ready
			}
			if s.Ready == 0 && line.NotReady == "" {
				if line.NotReady = s.Why; m.isPipeline {
					line.NotReady = "stage " + m.stages[i].Name() + ": " + s.Why
				}
			}
		}
		if x := staffing[m]; x.IsAsleep() {
			line.Asleep, line.NotReady = true, ""
		} else if x != nil && x.Failed != "" {
			line.NotReady = x.Failed
		}
		list = append(list, line)
	}
	return list
}

// Alive returns once every loop has answered. A loop that has ended counts.
func (b *Broker) Alive() {
	for _, l := range b.loops {
		l.Do(func() {})
	}
}
