// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
)

// route is an alias. Its requests take turns among its models, by their shares. A
// request in flight stays with its model when the alias changes.
type route struct {
	alias.Alias
	to   []*Model       // as Alias.To; nil: the broker has no such model now
	turn *atomic.Uint64 // lives on when the alias changes
}

func (m *models) newRoutes(list []admin.Alias, models map[string]*Model) map[string]*route {
	old := *m.routes.Load()
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
			r.turn = was.turn
		}
		next[a.Name] = r
	}
	return next
}

// serves reports whether the configuration names the model, or no model at all.
func (m *models) serves(name string) bool {
	return len(m.g.Cfg.Models) == 0 || slices.Contains(m.g.Cfg.Models, name)
}

// targetsOf returns the models of served aliases. They are served even if the
// configuration does not name them.
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

// next returns the model of the next request, or a ready model in its place; nil if
// the alias has no model now.
func (r *route) next() *Model { return r.readyModel(r.to[r.Turn(r.turn.Add(1))]) }

// main returns the model with the largest share, which describes the alias.
func (r *route) main() *Model {
	at := 0
	for i := range r.To {
		if r.To[i].Share > r.To[at].Share {
			at = i
		}
	}
	return r.readyModel(r.to[at])
}

// readyModel returns k if k is ready, else another model of the alias.
func (r *route) readyModel(k *Model) *Model {
	if k != nil && k.info.Load().ready {
		return k
	}
	for _, other := range r.to {
		if other != nil && (k == nil || other.info.Load().ready) {
			k = other
		}
	}
	return k
}

// version finds a model of the alias by its version, or by its whole name.
func (r *route) version(version string) *Model {
	for i, t := range r.To {
		if t.Model == version || alias.Version(t.Model) == version {
			return r.to[i]
		}
	}
	return nil
}

// versions returns the versions of the alias's models, as paths have them.
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

// find looks up a model, and its alias if the name is one. turn: for a request.
func (m *models) find(name, version string, turn bool) (*Model, *route) {
	models := *m.byName.Load()
	if r := (*m.routes.Load())[name]; r != nil {
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

// About finds a model for a question about it; Get, for a request.
func (m *models) About(ctx context.Context, name, version string) (*Model, *route, error) {
	return m.look(ctx, name, version, false)
}

// ModelName returns the name that the caller asked for.
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
