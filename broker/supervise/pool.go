// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// pool is one declaration and its processes. Its changes are made one at a
// time (Supervisor.changing), each so that somebody serves throughout: a new
// process has attached, warm, and looks for batches before an old one is told to
// end.
type pool struct {
	model string
	n     int // of the model's declarations
	cfg   *Worker
	procs []*process // instances and spares; the supervisor's mutex guards it
}

// startTime is how long a new process may take to be ready before a change that
// waits for it is given up.
const startTime = 10 * time.Minute

func (w *pool) label() string {
	label := w.model
	if label == "" {
		label = "worker"
	}
	if w.n > 0 {
		label += "." + strconv.Itoa(w.n)
	}
	if w.cfg.Name != "" {
		label = w.cfg.Name
	}
	return label
}

// start runs the i-th process of a pool; nil if the supervisor was stopped, or such
// processes were.
func (s *Supervisor) start(w *pool, cfg *Worker, i int, spare bool) *process {
	p := &process{
		s: s, pool: w, name: fmt.Sprintf("%s-%d", w.label(), i), instance: i, model: w.model, cfg: cfg, gpu: -1, spare: spare,
		stop: make(chan struct{}), over: make(chan struct{}), ready: make(chan struct{}), failed: make(chan struct{}), lostBatch: make(chan struct{}, 1),
	}
	if len(cfg.GPUs) > 0 {
		p.gpu = cfg.GPUs[i%len(cfg.GPUs)]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || cfg.Client && s.clientsStopped {
		return nil
	}
	s.procs = append(s.procs, p)
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		defer close(p.over)
		p.run()
	}()
	return p
}

// retire tells a process to end, and returns when it has.
func (s *Supervisor) retire(p *process) {
	s.mu.Lock()
	p.tell()
	s.mu.Unlock()
	<-p.over
	s.mu.Lock()
	s.procs = slices.DeleteFunc(s.procs, func(x *process) bool { return x == p })
	s.mu.Unlock()
}

// await returns when a new process is ready, or why it will not be.
func (p *process) await(ctx context.Context) error {
	if p.cfg.Client { // it never does
		return nil
	}
	over := time.NewTimer(startTime)
	defer over.Stop()
	select {
	case <-p.ready:
		return nil
	case <-p.failed:
		p.s.mu.Lock()
		defer p.s.mu.Unlock()
		if p.proven { // its next life was
			return nil
		}
		return fmt.Errorf("%w: the new process of %s ended before it was ready (%s); see the broker's log for what it printed", status.ErrInvalid, p.name, p.lastEnd)
	case <-p.over:
		return status.ErrDraining
	case <-over.C:
		return fmt.Errorf("%w: the new process of %s was not ready in %v", status.ErrTimeout, p.name, startTime)
	case <-ctx.Done():
		return fmt.Errorf("waiting for the new process of %s: %w", p.name, ctx.Err())
	}
}

// replace puts a process of this declaration into a pool's place i. If the new
// one does not come up the old one stays.
func (s *Supervisor) replace(ctx context.Context, w *pool, cfg *Worker, i int) error {
	s.mu.Lock()
	old := w.procs[i]
	spare := old.spare
	s.mu.Unlock()
	if cfg.Client { // two of them would want the same ports
		s.retire(old)
	}
	p := s.start(w, cfg, old.instance, spare)
	if p == nil {
		return status.ErrDraining
	}
	if err := p.await(ctx); err != nil {
		s.retire(p)
		return err
	}
	s.mu.Lock()
	p.spare = old.spare // which may have been promoted meanwhile
	w.procs[i] = p
	s.mu.Unlock()
	if !cfg.Client {
		s.retire(old)
	}
	return nil
}

// resize starts or ends processes until there are as many as cfg says.
func (s *Supervisor) resize(ctx context.Context, w *pool, cfg *Worker) error {
	for _, kind := range []struct {
		spare bool
		want  int
	}{{false, cfg.Instances}, {true, cfg.Spares}} {
		s.mu.Lock()
		var have []*process
		for _, p := range w.procs {
			if p.spare == kind.spare {
				have = append(have, p)
			}
		}
		s.mu.Unlock()
		var fresh []*process
		for n := len(have); n < kind.want; n++ {
			p := s.start(w, cfg, w.unused(), kind.spare)
			if p == nil {
				return status.ErrDraining
			}
			s.mu.Lock()
			w.procs = append(w.procs, p)
			s.mu.Unlock()
			fresh = append(fresh, p)
		}
		for _, p := range fresh {
			if err := p.await(ctx); err != nil {
				return err // it is started again like any other
			}
		}
		var ending sync.WaitGroup
		for _, p := range have[min(kind.want, len(have)):] {
			s.mu.Lock()
			w.procs = slices.DeleteFunc(w.procs, func(x *process) bool { return x == p })
			s.mu.Unlock()
			ending.Go(func() { s.retire(p) })
		}
		ending.Wait()
	}
	return nil
}

// unused is the lowest instance number that no process of the pool has.
func (w *pool) unused() int {
	for i := 0; ; i++ {
		if !slices.ContainsFunc(w.procs, func(p *process) bool { return p.instance == i }) {
			return i
		}
	}
}

// poolsOf are the declarations of a model that the broker runs processes for.
func (s *Supervisor) poolsOf(model string) (list []*pool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.pools {
		if w.model == model && !w.cfg.Client {
			list = append(list, w)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: the broker starts no workers of %q; those that others started are theirs to change", status.ErrInvalid, model)
	}
	return list, nil
}

// Restart replaces the processes of a model one by one, each when its
// successor is ready. It stops at the first that does not come up; the old
// ones that are left stay.
func (s *Supervisor) Restart(ctx context.Context, model string) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	list, err := s.poolsOf(model)
	if err != nil {
		return err
	}
	s.log.Info("worker processes are replaced one by one", "model", model)
	for _, w := range list {
		for i := range w.procs {
			if err := s.replace(ctx, w, w.cfg, i); err != nil {
				return err
			}
		}
	}
	return nil
}

// Scale runs that many instances of a model's workers.
func (s *Supervisor) Scale(ctx context.Context, model string, instances int) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	list, err := s.poolsOf(model)
	if err != nil {
		return err
	}
	if len(list) > 1 {
		return fmt.Errorf("%w: %q has %d kinds of workers; change their instances in the configuration file, and reload it", status.ErrInvalid, model, len(list))
	}
	cfg := *list[0].cfg
	cfg.Instances = instances
	if err := cfg.Fill(); err != nil || instances < 1 {
		return fmt.Errorf("%w: %d instances, must be 1..%d", status.ErrInvalid, instances, maxInstances)
	}
	s.log.Info("number of worker processes changes", "model", model, "instances", instances)
	s.setConfig(list[0], &cfg)
	return s.resize(ctx, list[0], &cfg)
}

func (s *Supervisor) setConfig(w *pool, cfg *Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.cfg = cfg
}

// Apply has a group run as it is declared now: what is declared anew is
// started, what is no longer is ended, and what is declared otherwise is
// replaced one by one.
func (s *Supervisor) Apply(ctx context.Context, g Group) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.Lock()
	var have []*pool
	for _, w := range s.pools {
		if w.model == g.Model {
			have = append(have, w)
		}
	}
	s.mu.Unlock()
	for i := range g.Workers {
		cfg := g.Workers[i]
		at := slices.IndexFunc(have, func(w *pool) bool { return w.n == i })
		if at < 0 {
			s.startPool(g.Model, i, &cfg)
			continue
		}
		if err := s.applyTo(ctx, have[at], &cfg); err != nil {
			return err
		}
	}
	for _, w := range have {
		if w.n < len(g.Workers) {
			continue
		}
		s.mu.Lock()
		s.pools = slices.DeleteFunc(s.pools, func(x *pool) bool { return x == w })
		s.mu.Unlock()
		for _, p := range w.procs {
			s.retire(p)
		}
	}
	return nil
}

func (s *Supervisor) applyTo(ctx context.Context, w *pool, cfg *Worker) error {
	was := *w.cfg
	same := was
	same.Instances, same.Spares = cfg.Instances, cfg.Spares
	s.setConfig(w, cfg)
	if !reflect.DeepEqual(same, *cfg) {
		for i := range w.procs[:min(len(w.procs), cfg.Instances+cfg.Spares)] {
			if err := s.replace(ctx, w, cfg, i); err != nil {
				s.setConfig(w, &was)
				return err
			}
		}
	}
	return s.resize(ctx, w, cfg)
}

// startPool starts the processes of the n-th declaration of a model.
func (s *Supervisor) startPool(model string, n int, cfg *Worker) {
	w := &pool{model: model, n: n, cfg: cfg}
	for i := range cfg.Instances + cfg.Spares {
		p := s.start(w, cfg, i, i >= cfg.Instances)
		if p == nil {
			return
		}
		s.mu.Lock()
		w.procs = append(w.procs, p)
		s.mu.Unlock()
	}
	s.mu.Lock()
	s.pools = append(s.pools, w)
	s.mu.Unlock()
}

// RoleOf tells whether an attached worker is to be kept warm, without batches,
// until one of its kind is lost. The first to come serves: a spare that
// attaches while a worker is still missing changes roles with it.
func (s *Supervisor) RoleOf(pid int) (spare bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.find(pid)
	return p != nil && p.spare && !p.changesRoles()
}

// changesRoles has a spare serve instead of a worker that is missing, if there
// is one. The supervisor's mutex is held.
func (p *process) changesRoles() bool {
	for _, missing := range p.pool.procs {
		if !missing.spare && !missing.told && missing.sessions == 0 {
			missing.spare, p.spare = true, false
			return true
		}
	}
	return false
}

// Promoted says that a spare has taken the place of a lost worker, whose next
// life will be the spare.
func (s *Supervisor) Promoted(spare, lost int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.find(spare); p != nil {
		p.spare = false
	}
	for _, p := range s.procs {
		if p.lost == lost && lost > 0 {
			p.spare = true
		}
	}
}
