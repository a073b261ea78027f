// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"fmt"
	"slices"
	"sync"
)

// Models without processes: the caller decides when (package staffing). Sleep returns after
// the last process has ended, so that its memory is free. Wake and Resize do not wait.

// changeModel begins a change of a model's pools, and returns its end. Changes of other
// models go on: one may wait for minutes.
func (s *Supervisor) changeModel(model string) (end func()) {
	s.mu.Lock()
	one := s.changing[model]
	if one == nil {
		one = &sync.Mutex{}
		s.changing[model] = one
	}
	s.mu.Unlock()
	one.Lock()
	return one.Unlock
}

// Sleep ends the processes of these models, as Stop does, and waits for them. A model that
// has none yet gets none. It wakes with the least instances of a range, and as a change says
// that waited for a new process.
func (s *Supervisor) Sleep(models ...string) {
	s.locked(func() {
		for _, model := range models {
			s.asleep[model] = true
		}
		for _, p := range s.procs {
			if slices.Contains(models, p.model) && !p.cfg.Client {
				p.endForGood()
			}
		}
	})
	var ending sync.WaitGroup
	for _, model := range models {
		ending.Go(func() { s.setAsleep(model, true) })
	}
	ending.Wait()
}

// Wake starts the processes of these models again.
func (s *Supervisor) Wake(models ...string) {
	for _, model := range models {
		s.setAsleep(model, false)
	}
}

func (s *Supervisor) setAsleep(model string, asleep bool) {
	defer s.changeModel(model)()
	s.locked(func() { s.asleep[model] = asleep })
	list, _ := s.poolsOf(model)
	for _, w := range list {
		cfg := *w.cfg
		if asleep && cfg.Most > 0 {
			cfg.Instances = max(1, cfg.Least)
		}
		s.setConfig(w, &cfg)
		s.fitPool(w, &cfg)
	}
}

// fitPool is resizePool without waiting for new processes.
func (s *Supervisor) fitPool(w *pool, cfg *Worker) {
	if _, surplus, err := s.growPool(w, cfg); err == nil {
		s.shrinkPool(w, surplus)
	}
}

// Resize changes the number of processes of a model whose instances have a range.
func (s *Supervisor) Resize(model string, instances int) {
	defer s.changeModel(model)()
	list, _ := s.poolsOf(model)
	for _, w := range list {
		if w.cfg.Most == 0 {
			continue
		}
		cfg := *w.cfg
		cfg.Instances = min(max(instances, cfg.Least, 1), cfg.Most)
		s.setConfig(w, &cfg)
		s.fitPool(w, &cfg)
	}
}

// Failing says why a model gets no workers: every process has ended before it attached,
// hopelessStarts times in a row. It is "" while one may still come.
func (s *Supervisor) Failing(model string) (why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.procs {
		switch {
		case p.model != model || p.cfg.Client || p.stopping:
		case p.failedStarts < hopelessStarts:
			return ""
		default:
			why = fmt.Sprintf("the start of %s failed %d times, the last: %s; see the broker's log", p.name, p.failedStarts, p.lastEnd)
		}
	}
	return why
}
