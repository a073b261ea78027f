// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/status"
)

// registry knows the models by name, and spreads them over the loops. Its lock
// is its own: nobody waits for a loop while holding it, and a loop takes it
// only when a session has ended.
//
// A name is free, being made, or there:
//
//	      reserve           publish
//	free ─────────► making ─────────► there
//	 ▲                 │ abandon        │ leave of the last session, if dynamic
//	 └─────────────────┴────────────────┘
//
// Who wants a name that is being made waits until it no longer is. Who has
// taken a model (take, reserve) keeps it from being forgotten until it leaves.
type registry struct {
	mu       sync.Mutex
	models   map[string]*model
	aliases  map[string]*aliasEntry // no name is in both
	loops    []*engine.Loop
	load     map[*engine.Loop]int // rings, and their sessions
	draining bool
	changes  changes
}

func newRegistry(epoch uint64, loops []*engine.Loop) *registry {
	return &registry{models: map[string]*model{}, aliases: map[string]*aliasEntry{}, loops: loops, load: map[*engine.Loop]int{}, changes: changes{count: epoch}}
}

// takeStage finds a model or a stage of a pipeline (PIPELINE/STAGE) and keeps
// it from being forgotten until leave. A pipeline's own name is refused: it has
// several.
func (g *registry) takeStage(name string) (*model, *stage, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m, s, err := g.findStage(name)
	if err == nil && m == nil {
		err = g.unknown(name)
	}
	if err == nil {
		g.join(m)
	}
	return m, s, err
}

// findStage is nil, nil, nil if there is no such model or pipeline.
func (g *registry) findStage(name string) (*model, *stage, error) {
	if m := g.wait(name); m != nil {
		s, err := m.only()
		return m, s, err
	}
	if i := strings.LastIndexByte(name, '/'); i > 0 {
		if m := g.wait(name[:i]); m != nil && m.isPipeline {
			s, err := m.stageNamed(name[i+1:])
			return m, s, err
		}
	}
	return nil, nil, nil
}

// reserveStage is reserve for a worker, which may name a stage.
func (g *registry) reserveStage(name string) (m *model, s *stage, mine bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m, s, err = g.findStage(name); m != nil || err != nil {
		if err == nil {
			g.join(m)
		}
		return m, s, false, err
	}
	m, mine, err = g.reserveLocked(name)
	return m, nil, mine, err
}

// reserve is take, but a name that is free becomes the caller's to make: then
// mine is true, and it must publish or abandon the model.
func (g *registry) reserve(name string) (m *model, mine bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.reserveLocked(name)
}

func (g *registry) reserveLocked(name string) (m *model, mine bool, err error) {
	if m = g.wait(name); m != nil {
		g.join(m)
		return m, false, nil
	}
	if g.draining {
		return nil, false, status.ErrDraining
	}
	if e := g.aliases[name]; e != nil {
		return nil, false, fmt.Errorf("%w: %q is an alias of %s; a model takes another name", status.ErrInvalid, name, &e.Alias)
	}
	m = &model{name: name, made: make(chan struct{}), undeclare: func() {}}
	g.models[name] = m
	return m, true, nil
}

// checkStages refuses to make a model beside a pipeline that has a stage of the same
// name: workers that name it would come to the one or the other, as they were early or late.
func (g *registry) checkStages(mc *ModelConfig) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, name := range mc.stageNames() {
		if m := g.models[name]; m != nil {
			remedy := "restart the broker: what the configuration declared stays until then"
			if m.made != nil || m.dynamic {
				remedy = "a worker that came before the pipeline was declared has made it: end that worker and its clients first"
			}
			return fmt.Errorf("%w: pipeline %q: its stage has the name of a model that is there, %q; %s", status.ErrInvalid, mc.Name, name, remedy)
		}
	}
	if i := strings.LastIndexByte(mc.Name, '/'); i > 0 {
		if p := g.models[mc.Name[:i]]; p != nil && p.made == nil && p.isPipeline && slices.Contains(p.stageNames(), mc.Name) {
			return fmt.Errorf("%w: model %q: that is the name of a stage of the pipeline %q", status.ErrInvalid, mc.Name, p.name)
		}
	}
	return nil
}

// wait finds a model that is not being made, nil if there is none.
func (g *registry) wait(name string) *model {
	for {
		m := g.models[name]
		if m == nil || m.made == nil {
			return m
		}
		made := m.made
		g.mu.Unlock()
		<-made
		g.mu.Lock()
	}
}

func (g *registry) join(m *model) {
	m.users++
	g.load[m.loop]++
}

// place chooses the loop with the least to do for a model that was built.
func (g *registry) place(m *model) {
	g.mu.Lock()
	defer g.mu.Unlock()
	least := g.loops[0]
	for _, l := range g.loops {
		if g.load[l] < g.load[least] {
			least = l
		}
	}
	g.load[least]++
	m.loop = least
	m.ring.ServeOn(least)
}

// publish lets everybody have a model that its loop has adopted. A dynamic
// one is taken already, for the worker that declared it.
func (g *registry) publish(m *model, dynamic bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m.dynamic = dynamic; dynamic {
		g.join(m)
	}
	g.endMaking(m)
	g.changes.note()
}

// abandon gives the name of a model that could not be made free again.
func (g *registry) abandon(m *model) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.models, m.name)
	if m.loop != nil {
		g.load[m.loop]--
	}
	g.endMaking(m)
}

func (g *registry) endMaking(m *model) {
	close(m.made)
	m.made = nil
}

// leave tells that one who had taken the model no longer needs it. A model
// that a worker declared is forgotten with the last.
func (g *registry) leave(m *model) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m.users--
	g.load[m.loop]--
	if m.dynamic && m.users == 0 {
		delete(g.models, m.name)
		g.load[m.loop]--
		g.changes.note()
		m.loop.Post(func() {
			m.loop.Forget(m.ring)
			m.undeclare()
			m.log.Info("model forgotten: its last worker and client left")
		})
	}
}

// setDynamic says whether a model goes with its last session, and returns
// what held until now. The caller has taken it.
func (g *registry) setDynamic(m *model, dynamic bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	was := m.dynamic
	m.dynamic = dynamic
	return was
}

func (g *registry) isDynamic(m *model) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return m.dynamic
}

// list is every model that is there, by name.
func (g *registry) list() []*model {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.DeleteFunc(g.sorted(), func(m *model) bool { return m.made != nil })
}

func (g *registry) sorted() []*model {
	return slices.SortedFunc(maps.Values(g.models), func(x, y *model) int { return strings.Compare(x.name, y.name) })
}

// drain refuses new models from now on.
func (g *registry) drain() {
	g.mu.Lock()
	g.draining = true
	g.mu.Unlock()
}

func (g *registry) drains() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.draining
}

// unknown also says which models there are: most often the name has a typo.
func (g *registry) unknown(name string) error {
	const most = 10
	if e := g.aliases[name]; e != nil {
		return fmt.Errorf("%w: %q is an alias of %s; name a model", status.ErrUnknownModel, name, &e.Alias)
	}
	there := slices.Sorted(maps.Keys(g.models))
	meant := typo.DidYouMean(name, slices.AppendSeq(slices.Clone(there), maps.Keys(g.aliases)))
	switch {
	case len(there) == 0:
		return fmt.Errorf("%w: %q; there are none", status.ErrUnknownModel, name)
	case len(there) > most:
		there = append(there[:most], "…")
	}
	return fmt.Errorf("%w: %q%s; there are %s", status.ErrUnknownModel, name, meant, strings.Join(there, ", "))
}
