// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/status"
)

// registry has the models by name, and spreads them over the loops. A goroutine that
// holds its lock does not wait for a loop. A loop takes the lock only when a session has
// ended.
//
// A name is free, being made, or there:
//
//	      reserveName        publishModel
//	free ─────────────► making ─────────► there
//	 ▲                    │ abandonModel    │ forget, after the last session, if dynamic
//	 └────────────────────┴─────────────────┘
//
// A caller that wants a name waits while the model is being made. A caller that has taken
// a model keeps it from being forgotten until leaveModel.
type registry struct {
	mu       sync.Mutex
	models   map[string]*model
	aliases  map[string]*aliasEntry // no name is in both
	loops    []*engine.Loop
	load     map[*engine.Loop]int // rings, and their sessions
	draining bool
	changes  changes
	forgot   func() // called on the loop of a model that was forgotten
	// willReturn says that a worker process of the group is being started again.
	willReturn func(group string) bool
}

func newRegistry(epoch uint64, loops []*engine.Loop) *registry {
	return &registry{
		models: map[string]*model{}, aliases: map[string]*aliasEntry{}, loops: loops, load: map[*engine.Loop]int{},
		changes: changes{count: epoch}, forgot: func() {}, willReturn: func(string) bool { return false },
	}
}

// takeStage takes a model, or a stage of a pipeline (PIPELINE/STAGE).
func (g *registry) takeStage(name string) (*model, *stage, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m, s, err := g.findStage(name)
	if err == nil && m == nil {
		err = g.unknownModel(name)
	}
	if err == nil {
		g.joinModel(m)
	}
	return m, s, err
}

// findStage returns nil, nil, nil if there is no such model or pipeline.
func (g *registry) findStage(name string) (*model, *stage, error) {
	if m := g.awaitModel(name); m != nil {
		s, err := m.onlyStage()
		return m, s, err
	}
	if i := strings.LastIndexByte(name, '/'); i > 0 {
		if m := g.awaitModel(name[:i]); m != nil && m.isPipeline {
			s, err := m.stageNamed(name[i+1:])
			return m, s, err
		}
	}
	return nil, nil, nil
}

// reserveStage is reserveName for a worker, which may name a stage.
func (g *registry) reserveStage(name string) (m *model, s *stage, mine bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m, s, err = g.findStage(name); m != nil || err != nil {
		if err == nil {
			g.joinModel(m)
		}
		return m, s, false, err
	}
	m, mine, err = g.reserveNameLocked(name)
	return m, nil, mine, err
}

// reserveName takes a model, or reserves a free name. If mine is true, the caller makes
// the model, and publishes or abandons it.
func (g *registry) reserveName(name string) (m *model, mine bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.reserveNameLocked(name)
}

func (g *registry) reserveNameLocked(name string) (m *model, mine bool, err error) {
	if m = g.awaitModel(name); m != nil {
		g.joinModel(m)
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

// checkStages refuses a model and a stage of one name: early and late workers of that
// name would attach to different ones.
func (g *registry) checkStages(mc *ModelConfig) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, name := range mc.stageNames() {
		if m := g.models[name]; m != nil {
			remedy := "restart the broker: what the configuration declared stays until then"
			if m.made != nil || m.dynamic {
				remedy = "a worker that came before the pipeline was declared has made it: end that worker and its clients first"
			}
			return fmt.Errorf("%w: pipeline %q: its stage has the name of a model that is there, %q; %s",
				status.ErrInvalid, mc.Name, name, remedy)
		}
	}
	if i := strings.LastIndexByte(mc.Name, '/'); i > 0 {
		if p := g.models[mc.Name[:i]]; p != nil && p.made == nil && p.isPipeline && slices.Contains(p.stageNames(), mc.Name) {
			return fmt.Errorf("%w: model %q: that is the name of a stage of the pipeline %q", status.ErrInvalid, mc.Name, p.name)
		}
	}
	return nil
}

// awaitModel finds a model that is not being made, nil if there is none.
func (g *registry) awaitModel(name string) *model {
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

func (g *registry) joinModel(m *model) {
	m.users++
	g.load[m.loop]++
}

func (g *registry) placeModel(m *model) {
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
	m.ring.SetLoop(least)
}

// publishModel ends the making of a model. A dynamic one is taken for its worker.
func (g *registry) publishModel(m *model, dynamic bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m.dynamic = dynamic; dynamic {
		g.joinModel(m)
	}
	g.endMaking(m)
	g.changes.noteChange()
}

// abandonModel frees the name of a model that could not be made.
func (g *registry) abandonModel(m *model) {
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

// leaveModel gives back a taken model. After the last leave a dynamic model is forgotten, unless
// the broker starts its worker again.
func (g *registry) leaveModel(m *model) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m.users--
	g.load[m.loop]--
	g.forgetUnawaited(m)
}

// noteWorker notes the group of a model's worker. Processes that serve another model now do not
// come back to their old one.
func (g *registry) noteWorker(m *model, group string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	m.group = group
	for _, other := range g.models {
		g.forgetUnawaited(other)
	}
}

// forgetUnlike forgets a model that waits for its worker, if a worker declares it otherwise now.
func (g *registry) forgetUnlike(mc *ModelConfig) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if m := g.models[mc.Name]; m != nil && m.isUnused() && !reflect.DeepEqual(m.declared, *mc) {
		g.forget(m)
	}
}

// isUnused is called with the registry's lock held.
func (m *model) isUnused() bool { return m.dynamic && m.users == 0 }

func (g *registry) forgetUnawaited(m *model) {
	if m.isUnused() && !g.willReturn(m.group) {
		g.forget(m)
	}
}

func (g *registry) forget(m *model) {
	delete(g.models, m.name)
	g.load[m.loop]--
	g.changes.noteChange()
	m.loop.Post(func() {
		m.loop.ForgetRing(m.ring)
		m.undeclare()
		m.log.Info("model forgotten: its last worker and client left")
		g.forgot()
	})
}

// serves reports whether there is a model, or a stage of a pipeline, of that name.
func (g *registry) serves(name string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.models[name] != nil {
		return true
	}
	for _, m := range g.models {
		if m.made == nil && m.isPipeline && slices.Contains(m.stageNames(), m.name+"/"+name) {
			return true
		}
	}
	return false
}

// setDynamic sets m.dynamic of a taken model, and returns the old value.
func (g *registry) setDynamic(m *model, dynamic bool) (was bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	was, m.dynamic = m.dynamic, dynamic
	return was
}

func (g *registry) isDynamic(m *model) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return m.dynamic
}

// listModels lists the models by name, without those being made.
func (g *registry) listModels() []*model {
	g.mu.Lock()
	defer g.mu.Unlock()
	list := slices.SortedFunc(maps.Values(g.models), func(x, y *model) int { return strings.Compare(x.name, y.name) })
	return slices.DeleteFunc(list, func(m *model) bool { return m.made != nil })
}

func (g *registry) refuseNew() {
	g.mu.Lock()
	g.draining = true
	g.mu.Unlock()
}

func (g *registry) isDraining() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.draining
}

// unknownModel lists the models, since most often the name has a typo.
func (g *registry) unknownModel(name string) error {
	if e := g.aliases[name]; e != nil {
		return fmt.Errorf("%w: %q is an alias of %s; name a model", status.ErrUnknownModel, name, &e.Alias)
	}
	there := slices.Sorted(maps.Keys(g.models))
	meant := typo.DidYouMean(name, slices.AppendSeq(slices.Clone(there), maps.Keys(g.aliases)))
	switch {
	case len(there) == 0:
		return fmt.Errorf("%w: %q; there are none", status.ErrUnknownModel, name)
	case len(there) > mostNamed:
		there = append(there[:mostNamed], "…")
	}
	return fmt.Errorf("%w: %q%s; there are %s", status.ErrUnknownModel, name, meant, strings.Join(there, ", "))
}
