// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
)

// route is an alias: requests for it go to the models that it stands for, each
// in its turn, so that the shares are of requests here. What is under way when
// the alias changes ends where it is.
type route struct {
	alias.Alias
	to   []*Model       // as Alias.To; nil: the broker has no such model now
	turn *atomic.Uint64 // of the alias, however often it changes
}

// routes are those of the broker's aliases that may be served.
func (m *models) newRoutes(list []admin.Alias, models map[string]*Model) map[string]*route {
	old := *m.Routes.Load()
	next := make(map[string]*route, len(list))
	for _, a := range list {
		if !m.serves(a.Name) {
			continue
		}
		r := &route{Alias: a.Alias, turn: new(atomic.Uint64)}
		for _, t := range a.To {
			r.to = append(r.to, models[t.Model])
		}
		if was := old[a.Name]; was != nil {
			r.turn = was.turn // a copy would take turns again that requests had meanwhile
		}
		next[a.Name] = r
	}
	return next
}

// serves says whether the configuration names it, or names nothing.
func (m *models) serves(name string) bool {
	return len(m.g.Cfg.Models) == 0 || slices.Contains(m.g.Cfg.Models, name)
}

// targetsOf are the models that served aliases stand for: they can be reached
// also if the configuration does not name them.
func (m *models) targetsOf(list []admin.Alias) map[string]bool {
	targets := map[string]bool{}
	for _, a := range list {
		for _, t := range a.To {
			if m.serves(a.Name) {
				targets[t.Model] = true
			}
		}
	}
	return targets
}

// next is the model that the next request goes to: one that would not answer is
// passed over while another would. nil if none is there.
func (r *route) next() *Model {
	k := r.to[r.Turn(r.turn.Add(1))]
	if k != nil && k.info.Load().ready > 0 {
		return k
	}
	return r.instead(k)
}

// main is the model with the largest share, to tell of the alias.
func (r *route) main() *Model {
	at := 0
	for i := range r.To {
		if r.To[i].Share > r.To[at].Share {
			at = i
		}
	}
	return r.instead(r.to[at])
}

// instead is another one that would answer, if k would not.
func (r *route) instead(k *Model) *Model {
	if k != nil && k.info.Load().ready > 0 {
		return k
	}
	for _, other := range r.to {
		if other != nil && (k == nil || other.info.Load().ready > 0) {
			k = other
		}
	}
	return k
}

// version finds a model of the alias by its version, or by its whole name.
func (r *route) version(version string) *Model {
	for i, t := range r.To {
		if hasVersion(t, version) {
			return r.to[i]
		}
	}
	return nil
}

func hasVersion(t alias.Target, version string) bool {
	return t.Model == version || alias.Version(t.Model) == version
}

// versions are what the alias's models are called in a path.
func (r *route) versions() (list []string) {
	for _, t := range r.To {
		list = append(list, versionOf(t.Model))
	}
	return list
}

func versionOf(model string) string {
	if v := alias.Version(model); v != "" {
		return v
	}
	return model
}

// find looks a name and a version up: the model, and the alias if it is one.
// turn says that it is for a request.
func (m *models) find(name, version string, turn bool) (*Model, *route) {
	models := *m.byName.Load()
	if r := (*m.Routes.Load())[name]; r != nil {
		var k *Model
		switch {
		case version != "":
			k = r.version(version)
		case turn:
			k = r.next()
		default:
			k = r.main()
		}
		if k != nil {
			return k, r
		}
	}
	if k := models[name]; k != nil && (version == "" || version == modelVersion) {
		return k, nil
	}
	if version != "" {
		return models[name+"@"+version], nil
	}
	return nil, nil
}

// About is get for who wants to know something, and runs nothing.
func (m *models) About(ctx context.Context, name, version string) (*Model, *route, error) {
	return m.look(ctx, name, version, false)
}

// ModelName and modelVersion are what an answer says: what was asked for.
func (c *Call) ModelName() string {
	if c.As != nil {
		return c.As.Name
	}
	return c.Model.Name
}

func (c *Call) ModelVersion() string {
	if c.As != nil {
		return versionOf(c.Model.Name)
	}
	return modelVersion
}
