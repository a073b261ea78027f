// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"time"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
)

// A new worker must look for batches before the supervisor ends the old one: on a busy
// machine that may be long after it attached. The broker cannot see the look of a worker
// that never waits. It believes such a worker after Config.firstLookTime.
const (
	defaultFirstLookTime = 5 * time.Second
	mostLookPause        = 20 * time.Millisecond
)

// awaitFirstLook reports to the supervisor when a worker is ready.
func (b *Broker) awaitFirstLook(w *engine.WorkerSession) {
	pause := time.Millisecond
	for end := time.Now().Add(b.cfg.firstLookTime); ; time.Sleep(pause) {
		looked, gone := w.HasLooked()
		if gone {
			return
		}
		if looked || time.Now().After(end) {
			b.super.Ready(w.Pid)
			return
		}
		pause = min(2*pause, mostLookPause)
	}
}

// listModels answers OpModels.
func (b *Broker) listModels() (list []control.Model) {
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
