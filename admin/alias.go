// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/internal/control"
)

// Alias is an alias of the broker.
type Alias struct {
	alias.Alias
	Clients []int // attached to the alias, for each of To
}

// Aliases lists the broker's aliases, sorted by name.
func (c *Client) Aliases(ctx context.Context) ([]Alias, error) {
	rep, err := c.ask(ctx, &control.Request{Op: control.OpModels})
	if err != nil {
		return nil, err
	}
	return aliases(rep), nil
}

func aliases(rep *control.Reply) []Alias {
	list := make([]Alias, 0, len(rep.Aliases))
	for _, a := range rep.Aliases {
		out := Alias{Alias: alias.Alias{Name: a.Name}}
		for _, t := range a.To {
			out.To = append(out.To, alias.Target{Model: t.Model, Share: alias.Share(t.Share)})
			out.Clients = append(out.Clients, t.Clients)
		}
		list = append(list, out)
	}
	return list
}

// Listing is Models and Aliases of one moment.
type Listing struct {
	Epoch    uint64 // changes with each restart of the broker
	Draining bool   // the broker is about to end
	Models   []Model
	Aliases  []Alias
}

// List returns the broker's models and aliases.
func (c *Client) List(ctx context.Context) (Listing, error) {
	list, rep, err := c.models(ctx)
	if err != nil {
		return Listing{}, err
	}
	return Listing{rep.Epoch, rep.Draining, list, aliases(rep)}, nil
}

// SetAlias routes a name to these models from now on. Clients that are attached to
// the name move by themselves. save: as in SetAndSave.
func (c *Client) SetAlias(ctx context.Context, a alias.Alias, save bool) error {
	if err := a.Check(); err != nil {
		return err
	}
	req := control.Request{Op: control.OpAlias, Model: a.Name, Save: save}
	for _, t := range a.To {
		req.Targets = append(req.Targets, control.AliasTarget{Model: t.Model, Share: int(t.Share)})
	}
	_, err := c.call(ctx, &req)
	return err
}

// RemoveAlias forgets an alias. Attached clients stay with their model.
func (c *Client) RemoveAlias(ctx context.Context, name string, save bool) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpAlias, Model: name, Save: save})
	return err
}
