// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"time"
)

// A worker is ready when it waits for work, or runs a batch that does not take
// unusually long. A worker attaches after its warm-up, so a new one is ready.
const (
	// A batch takes unusually long after both of these.
	leastUnusual  = time.Second
	unusualFactor = 4 // times the longest batch that the model ever took
)

// Readiness is how many workers of a stage are ready.
type Readiness struct {
	Attached int
	Ready    int
	Why      string // if Ready is 0
}

// Readiness counts clients and ready workers; false if the ring is gone. No loop calls it.
func (r *Ring) Readiness() (clients int, stages []Readiness, ok bool) {
	var workers [][]fitness
	if !r.Do(func() {
		clients = len(r.clients)
		for _, s := range r.stages {
			workers = append(workers, s.listFitness())
		}
	}) {
		return 0, nil, false
	}
	for _, list := range workers {
		ready, why := countReady(list)
		stages = append(stages, Readiness{Attached: len(list), Ready: ready, Why: why})
	}
	return clients, stages, true
}

// HasLooked says whether the worker has looked for batches, and is gone. No loop calls it.
func (w *WorkerSession) HasLooked() (looked, gone bool) {
	gone = true
	w.stage.ring.Do(func() {
		if gone = w.state == workerGone; !gone {
			looked = w.box.Parked.Load() != 0 || w.box.Taken.Load() > 0
		}
	})
	return looked, gone
}

// fitness is a worker's readiness as its loop sees it.
type fitness struct {
	name  string
	pid   int
	unfit string // why it is not ready; "": it is
}

// listFitness is called on the loop.
func (s *Stage) listFitness() []fitness {
	list := make([]fitness, 0, s.present)
	for _, w := range s.workers {
		if w != nil {
			list = append(list, fitness{w.Label(), w.Pid, s.whyUnfit(w)})
		}
	}
	return list
}

func (s *Stage) whyUnfit(w *WorkerSession) string {
	switch {
	case w.state == workerQuarantined:
		return "outlived its lease and cannot be killed"
	case w.state.isGivenUp():
		return "is being replaced"
	case w.state == workerSuspended:
		return "failed batches that other workers ran"
	case len(w.mails) == 0:
		return ""
	}
	if n, err := w.done.Pending(); err == nil && n >= len(w.mails) { // it has finished all
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

// countReady counts the ready workers, and says why there are none. No loop calls it.
func countReady(workers []fitness) (ready int, why string) {
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

func isStopped(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	rest := bytes.TrimSpace(text[bytes.LastIndexByte(text, ')')+1:]) // the process's name may have any bytes
	return len(rest) > 0 && (rest[0] == 'T' || rest[0] == 't')
}
