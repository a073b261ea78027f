// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
)

// A model is ready when a worker can be counted on: it is attached, and it
// waits for work, or has begun a batch that does not take unusually long. A
// worker attaches when it has warmed up, so a new one counts.
const (
	// A batch takes unusually long once it has run for both of these.
	leastUnusual  = time.Second
	unusualFactor = 4 // times the longest batch that the model ever took
)

// A worker that another one is to be ended for has first to look for batches:
// what it does between attaching and that may take long on a busy machine, and
// who is ended is missed meanwhile. One that looks without ever waiting is not
// seen to, and is believed after Config.firstLookTime.
const (
	defaultFirstLookTime = 5 * time.Second
	mostLookPause        = 20 * time.Millisecond
)

// awaitFirstLook tells the supervisor when a worker is ready. Not on the loop.
func (b *Broker) awaitFirstLook(l *loop, w *workerSession) {
	pause := time.Millisecond
	for end := time.Now().Add(b.cfg.firstLookTime); ; time.Sleep(pause) {
		looked, gone := false, false
		if !l.do(func() {
			if gone = w.gone || w.stage.ring.closed; !gone {
				looked = w.box.Parked.Load() != 0 || w.box.Taken.Load() > 0
			}
		}) || gone {
			return
		}
		if looked || time.Now().After(end) {
			b.super.Ready(w.pid)
			return
		}
		pause = min(2*pause, mostLookPause)
	}
}

// fitness is what the loop tells of one worker.
type fitness struct {
	name  string
	pid   int
	unfit string // why it cannot be counted on; "": it can
}

// fitWorkers is called on the loop.
func (s *stage) fitWorkers() []fitness {
	list := make([]fitness, 0, s.present)
	for _, w := range s.workers {
		if w != nil {
			list = append(list, fitness{w.label(), w.pid, s.unfit(w)})
		}
	}
	return list
}

func (s *stage) unfit(w *workerSession) string {
	switch {
	case w.quarantined:
		return "outlived its lease and cannot be killed"
	case w.dying || w.broken || w.hungUp || w.verdict > 0:
		return "is being replaced"
	case w.suspended:
		return "failed batches that other workers ran"
	case len(w.mails) == 0:
		return ""
	}
	if n, err := w.done.Pending(); err == nil && n >= len(w.mails) { // all answered, not read yet
		return ""
	}
	usual := s.settings.Lease // its first batch may compile something
	if longest := s.stats.compute.Max(); w.batches > 0 {
		usual = min(usual, max(leastUnusual, unusualFactor*longest))
	}
	if took := time.Duration(s.loop.now - w.mails[0].begun); took > usual {
		return fmt.Sprintf("has had a batch for %v", took.Round(100*time.Millisecond))
	}
	return ""
}

// judge counts the workers that can be counted on, and says why there are none.
// It looks into /proc, and so is not called on a loop.
func judge(workers []fitness) (ready int, why string) {
	if len(workers) == 0 {
		return 0, "no worker attached"
	}
	var unfit []string
	for _, w := range workers {
		if w.unfit == "" && isStopped(w.pid) {
			w.unfit = "is stopped (SIGSTOP)"
		}
		if w.unfit == "" {
			ready++
		} else {
			unfit = append(unfit, fmt.Sprintf("worker %s (pid %d) %s", w.name, w.pid, w.unfit))
		}
	}
	if ready > 0 {
		return ready, ""
	}
	const most = 3
	if len(unfit) > most {
		unfit = append(unfit[:most], fmt.Sprintf("%d more", len(workers)-most))
	}
	return 0, strings.Join(unfit, ", ")
}

// judgeStages is judge for a model that may have several stages: it is as ready
// as the one that is ready least.
func (m *model) judgeStages(workers [][]fitness) (ready int, why string) {
	for i, s := range m.ring.stages {
		n, reason := judge(workers[i])
		if i == 0 || n < ready {
			ready = n
		}
		if n == 0 && why == "" {
			if why = reason; m.isPipeline() {
				why = "stage " + s.cfgName + ": " + reason
			}
		}
	}
	return ready, why
}

// isStopped tells whether a process cannot answer because somebody stopped it.
func isStopped(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	rest := bytes.TrimSpace(text[bytes.LastIndexByte(text, ')')+1:]) // its name may hold anything
	return len(rest) > 0 && (rest[0] == 'T' || rest[0] == 't')
}

// listModels is what OpModels answers.
func (b *Broker) listModels() (list []control.Model) {
	for _, m := range b.models.list() {
		line := m.line()
		var workers [][]fitness // by stage
		if m.do(func() {
			line.Clients = len(m.ring.clients)
			for _, s := range m.ring.stages {
				line.Workers += s.present
				workers = append(workers, s.fitWorkers())
			}
		}) {
			line.ReadyWorkers, line.NotReady = m.judgeStages(workers)
			list = append(list, line)
		}
	}
	return list
}

// Alive returns once every loop has answered. A loop that has ended counts.
func (b *Broker) Alive() {
	for _, l := range b.loops {
		l.do(func() {})
	}
}
