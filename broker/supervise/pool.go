// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// pool is one declaration and its processes. The changes of a model are made one at a time
// (changeModel). A new process looks for batches before an old one is ended.
type pool struct {
	model string
	n     int // of the model's declarations
	cfg   *Worker
	procs []*process // instances and spares; the supervisor's mutex guards it
}

// startTime is how long a change waits for a new process to be ready.
const startTime = 10 * time.Minute

func (w *pool) label() string {
	if w.cfg.Name != "" {
		return w.cfg.Name
	}
	label := cmp.Or(w.model, "worker")
	if w.n > 0 {
		label += "." + strconv.Itoa(w.n)
	}
	return label
}

// startProcess runs the i-th process of a pool; nil if the supervisor was stopped, or the model sleeps.
func (s *Supervisor) startProcess(w *pool, cfg *Worker, i int, spare bool) *process {
	p := &process{
		s: s, pool: w, name: fmt.Sprintf("%s-%d", w.label(), i), instance: i, model: w.model, cfg: cfg, gpu: -1, spare: spare,
		stop: make(chan struct{}), over: make(chan struct{}), ready: make(chan struct{}), failed: make(chan struct{}),
		lostBatch: make(chan struct{}, 1),
	}
	if len(cfg.GPUs) > 0 {
		p.gpu = cfg.GPUs[i%len(cfg.GPUs)]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || cfg.Client && s.clientsStopped || !cfg.Client && s.asleep[w.model] {
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

// whyEnded is the error of a change whose process was ended, or not started. It is nil if the
// model sleeps: it wakes as the change says.
func (s *Supervisor) whyEnded(model string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asleep[model] {
		return nil
	}
	return status.ErrDraining
}

func (s *Supervisor) retireProcess(p *process) {
	s.locked(p.endForGood)
	<-p.over
	s.locked(func() { s.procs = slices.DeleteFunc(s.procs, func(x *process) bool { return x == p }) })
}

// awaitReady waits until a new process is ready. A client counts as ready at once.
func (p *process) awaitReady(ctx context.Context) error {
	if p.cfg.Client {
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
		if p.proven { // in its next life
			return nil
		}
		return fmt.Errorf("%w: the new process of %s ended before it was ready (%s); see the broker's log for what it printed",
			status.ErrInvalid, p.name, p.lastEnd)
	case <-p.over:
		return p.s.whyEnded(p.model)
	case <-over.C:
		return fmt.Errorf("%w: the new process of %s was not ready in %v", status.ErrTimeout, p.name, startTime)
	case <-ctx.Done():
		return fmt.Errorf("waiting for the new process of %s: %w", p.name, ctx.Err())
	}
}

// replaceProcess replaces a pool's i-th process, unless the new one does not come up.
func (s *Supervisor) replaceProcess(ctx context.Context, w *pool, cfg *Worker, i int) error {
	s.mu.Lock()
	old := w.procs[i]
	spare := old.spare
	s.mu.Unlock()
	if cfg.Client { // both would want the same ports
		s.retireProcess(old)
	}
	p := s.startProcess(w, cfg, old.instance, spare)
	if p == nil {
		return s.whyEnded(w.model)
	}
	if err := p.awaitReady(ctx); err != nil {
		s.retireProcess(p)
		return err
	}
	s.mu.Lock()
	p.spare = old.spare // it may have been promoted meanwhile
	w.procs[i] = p
	s.mu.Unlock()
	if !cfg.Client {
		s.retireProcess(old)
	}
	return nil
}

// resizePool starts or ends processes until there are as many as cfg says. New ones are ready
// before surplus ones end.
func (s *Supervisor) resizePool(ctx context.Context, w *pool, cfg *Worker) error {
	fresh, surplus, err := s.growPool(w, cfg)
	for _, p := range fresh {
		if err == nil {
			err = p.awaitReady(ctx) // after an error the process is started again
		}
	}
	if err == nil {
		s.shrinkPool(w, surplus)
	}
	return err
}

// growPool starts the processes that a pool lacks, and returns them and the surplus ones. A
// pool that sleeps lacks none.
func (s *Supervisor) growPool(w *pool, cfg *Worker) (fresh, surplus []*process, err error) {
	for _, kind := range []struct {
		spare bool
		want  int
	}{{false, cfg.Instances}, {true, cfg.Spares}} {
		s.mu.Lock()
		if s.asleep[w.model] {
			kind.want = 0
		}
		var have []*process
		for _, p := range w.procs {
			if p.spare == kind.spare {
				have = append(have, p)
			}
		}
		s.mu.Unlock()
		for n := len(have); n < kind.want; n++ {
			p := s.startProcess(w, cfg, w.unused(), kind.spare)
			if p == nil {
				return fresh, nil, s.whyEnded(w.model)
			}
			s.locked(func() { w.procs = append(w.procs, p) })
			fresh = append(fresh, p)
		}
		surplus = append(surplus, have[min(kind.want, len(have)):]...)
	}
	return fresh, surplus, nil
}

// shrinkPool ends processes of a pool, and waits for them.
func (s *Supervisor) shrinkPool(w *pool, surplus []*process) {
	var ending sync.WaitGroup
	for _, p := range surplus {
		s.locked(func() { w.procs = slices.DeleteFunc(w.procs, func(x *process) bool { return x == p }) })
		ending.Go(func() { s.retireProcess(p) })
	}
	ending.Wait()
}

func (w *pool) unused() int {
	for i := 0; ; i++ {
		if !slices.ContainsFunc(w.procs, func(p *process) bool { return p.instance == i }) {
			return i
		}
	}
}

func (s *Supervisor) poolsOf(model string) (list []*pool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range s.pools {
		if w.model == model && !w.cfg.Client {
			list = append(list, w)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("%w: the broker starts no workers of %q; only those that it starts can be changed", status.ErrInvalid, model)
	}
	return list, nil
}

// Restart replaces the processes of a model one by one, each when its successor is ready.
// If a successor does not come up, the remaining processes stay.
func (s *Supervisor) Restart(ctx context.Context, model string) error {
	defer s.changeModel(model)()
	list, err := s.poolsOf(model)
	if err != nil {
		return err
	}
	s.log.Info("worker processes are replaced one by one", "model", model)
	for _, w := range list {
		for i := range w.procs {
			if err := s.replaceProcess(ctx, w, w.cfg, i); err != nil {
				return err
			}
		}
	}
	return nil
}

// Scale changes the number of instances of a model's workers.
func (s *Supervisor) Scale(ctx context.Context, model string, instances int) error {
	defer s.changeModel(model)()
	list, err := s.poolsOf(model)
	if err != nil {
		return err
	}
	if len(list) > 1 {
		return fmt.Errorf("%w: %q has %d kinds of workers; change their instances in the configuration file, and reload it",
			status.ErrInvalid, model, len(list))
	}
	cfg := *list[0].cfg
	if cfg.Most > 0 {
		return fmt.Errorf("%w: instances = [%d, %d] of %q: the broker follows the load; change the range in the configuration file, and reload it",
			status.ErrInvalid, cfg.Least, cfg.Most, model)
	}
	cfg.Instances = instances
	if err := cfg.Fill(); err != nil || instances < 1 {
		return fmt.Errorf("%w: %d instances, must be 1..%d", status.ErrInvalid, instances, maxInstances)
	}
	s.log.Info("number of worker processes changes", "model", model, "instances", instances)
	s.setConfig(list[0], &cfg)
	return s.resizePool(ctx, list[0], &cfg)
}

func (s *Supervisor) setConfig(w *pool, cfg *Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.cfg = cfg
}

// Apply starts new workers of a group, ends removed ones, and replaces changed ones.
func (s *Supervisor) Apply(ctx context.Context, g Group) error {
	defer s.changeModel(g.Model)()
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
		if err := s.changePool(ctx, have[at], &cfg); err != nil {
			return err
		}
	}
	for _, w := range have {
		if w.n < len(g.Workers) {
			continue
		}
		s.locked(func() { s.pools = slices.DeleteFunc(s.pools, func(x *pool) bool { return x == w }) })
		for _, p := range w.procs {
			s.retireProcess(p)
		}
	}
	return nil
}

func (s *Supervisor) changePool(ctx context.Context, w *pool, cfg *Worker) error {
	was := *w.cfg
	same := was
	same.Instances, same.Spares, same.Least, same.Most, same.Memory = cfg.Instances, cfg.Spares, cfg.Least, cfg.Most, cfg.Memory
	s.locked(func() {
		if cfg.Most > 0 && !s.asleep[w.model] {
			cfg.Instances = min(max(was.Instances, cfg.Instances), cfg.Most)
		}
		w.cfg = cfg
	})
	if !reflect.DeepEqual(same, *cfg) {
		for i := range w.procs[:min(len(w.procs), cfg.Instances+cfg.Spares)] {
			if err := s.replaceProcess(ctx, w, cfg, i); err != nil {
				s.setConfig(w, &was)
				return err
			}
		}
	}
	return s.resizePool(ctx, w, cfg)
}

func (s *Supervisor) startPool(model string, n int, cfg *Worker) {
	w := &pool{model: model, n: n, cfg: cfg}
	s.locked(func() { s.pools = append(s.pools, w) })
	_, _, _ = s.growPool(w, cfg) // it fails only if the supervisor was stopped
}

// Declared is the declarations of a model's workers as they were last applied.
func (s *Supervisor) Declared(model string) (list []Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := 0; ; n++ {
		i := slices.IndexFunc(s.pools, func(w *pool) bool { return w.model == model && w.n == n })
		if i < 0 {
			return list
		}
		list = append(list, *s.pools[i].cfg)
	}
}

// AssignRole says whether an attached worker is a spare. The first to come serves: a spare
// that attaches while a worker is still missing changes roles with it.
func (s *Supervisor) AssignRole(pid int) (spare bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.findProcess(pid)
	return p != nil && p.spare && !p.replaceMissing()
}

// replaceMissing has a spare change roles with a missing worker. The mutex is held.
func (p *process) replaceMissing() bool {
	for _, missing := range p.pool.procs {
		if !missing.spare && !missing.stopping && missing.sessions == 0 {
			missing.spare, p.spare = true, false
			return true
		}
	}
	return false
}

// Promoted reports that a spare and a lost worker have changed roles.
func (s *Supervisor) Promoted(spare, lost int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.findProcess(spare); p != nil {
		p.spare = false
	}
	for _, p := range s.procs {
		if p.lost == lost && lost > 0 {
			p.spare = true
		}
	}
}
