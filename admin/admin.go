// SPDX-License-Identifier: Apache-2.0

// Package admin asks a broker about itself and changes its policies: what the
// commands `ringbatch models`, `stats`, `set` and `doctor` do, for Go
// programs.
//
//	a := admin.New("")                  // the default socket
//	list, err := a.Models(ctx)
//	s, err := a.Stats(ctx)
//	err = a.Set(ctx, "resnet50", policy.New(policy.WaitTime(3*time.Millisecond)))
//
// A program that follows the broker's models waits for changes instead of
// asking again and again:
//
//	var known uint64
//	for {
//		now, err := a.Changed(ctx, known)
//		if err != nil {
//			return err // ctx has ended, or the broker has gone: try again later
//		}
//		known = now
//		list, err := a.Models(ctx)
//		…
//	}
//
// Errors are those of package status (compare with errors.Is), or the
// context's own.
package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/tensor"
)

// Client calls one broker. Each call makes a connection of its own, so a
// Client holds nothing, needs no Close, outlives a restart of the broker, and
// may be used from many goroutines at once.
type Client struct{ socket string }

// New returns a client of the broker at this socket. An empty path means
// $RINGBATCH_SOCKET, or else the user's default. New connects to nothing.
func New(socket string) *Client { return &Client{control.SocketPath(socket)} }

// Socket is the path that the client connects to.
func (c *Client) Socket() string { return c.socket }

// Broker is who answered a Ping.
type Broker struct {
	Pid   int
	Epoch uint64 // another one after each restart
}

// Ping returns who serves the socket, once its loops have answered: it lives.
func (c *Client) Ping(ctx context.Context) (Broker, error) {
	rep, err := c.ask(ctx, &control.Request{Op: control.OpPing})
	if err != nil {
		return Broker{}, err
	}
	return Broker{Pid: rep.Pid, Epoch: rep.Epoch}, nil
}

// Model is one of the broker's models.
type Model struct {
	Name      string
	Signature tensor.Signature
	Policy    policy.Policy // every setting
	Workers   int           // attached now
	Clients   int           // attached now
	Ready     int           // workers that can be counted on: see Ready
	NotReady  string        // why there are none
}

// Models lists the broker's models, sorted by name.
func (c *Client) Models(ctx context.Context) ([]Model, error) {
	list, _, err := c.models(ctx)
	return list, err
}

func (c *Client) models(ctx context.Context) ([]Model, *control.Reply, error) {
	rep, err := c.ask(ctx, &control.Request{Op: control.OpModels})
	if err != nil {
		return nil, nil, err
	}
	list := make([]Model, 0, len(rep.Models))
	for i := range rep.Models {
		m := &rep.Models[i]
		sig, err := tensor.ParseSignature(m.Inputs, m.Outputs)
		if err != nil {
			return nil, nil, fmt.Errorf("model %q: %w", m.Name, err)
		}
		list = append(list, Model{Name: m.Name, Signature: sig, Policy: m.Policy, Workers: m.Workers, Clients: m.Clients, Ready: m.ReadyWorkers, NotReady: m.NotReady})
	}
	slices.SortFunc(list, func(x, y Model) int { return strings.Compare(x.Name, y.Name) })
	return list, rep, nil
}

// Stats returns everything the broker counts.
func (c *Client) Stats(ctx context.Context) (*stats.Broker, error) {
	raw, err := c.StatsJSON(ctx)
	if err != nil {
		return nil, err
	}
	s := new(stats.Broker)
	if err := json.Unmarshal(raw, s); err != nil {
		return nil, fmt.Errorf("statistics: %w", err)
	}
	return s, nil
}

// StatsJSON is Stats as the broker sent it: a newer broker may count more than
// package stats of this build knows.
func (c *Client) StatsJSON(ctx context.Context) ([]byte, error) {
	rep, err := c.ask(ctx, &control.Request{Op: control.OpStats})
	if err != nil {
		return nil, err
	}
	return rep.Stats, nil
}

// Batches are the batches of a model that workers have finished since the first
// so many, as far as the broker remembers them.
func (c *Client) Batches(ctx context.Context, model string, since uint64) (*stats.Batches, error) {
	rep, err := c.ask(ctx, &control.Request{Op: control.OpBatches, Model: model, Since: since})
	if err != nil {
		return nil, err
	}
	b := new(stats.Batches)
	if err := json.Unmarshal(rep.Stats, b); err != nil {
		return nil, fmt.Errorf("batches: %w", err)
	}
	return b, nil
}

// Trace records what happens to the requests of a model for so long.
func (c *Client) Trace(ctx context.Context, model string, d time.Duration) (*stats.Trace, error) {
	rep, err := c.ask(ctx, &control.Request{Op: control.OpTrace, Model: model, Millis: int(d.Milliseconds())})
	if err != nil {
		return nil, err
	}
	t := new(stats.Trace)
	if err := json.Unmarshal(rep.Stats, t); err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	return t, nil
}

// Set changes settings of a model's policy while it runs: all of them, or none
// if one is refused.
func (c *Client) Set(ctx context.Context, model string, settings policy.Policy) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpSet, Model: model, Policy: settings})
	return err
}

// SetAndSave is Set that also holds when the broker is started again: it keeps
// it beside its configuration file.
func (c *Client) SetAndSave(ctx context.Context, model string, settings policy.Policy) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpSet, Model: model, Policy: settings, Save: true})
	return err
}

// Restart replaces the worker processes of a model that the broker started,
// one by one: each ends only after its successor has attached. It returns when
// all are replaced, or at the first that does not come up.
func (c *Client) Restart(ctx context.Context, model string) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpRestart, Model: model})
	return err
}

// Scale has the broker run that many instances of a model's worker process. It
// returns when they have attached, or ended. save as in SetAndSave.
func (c *Client) Scale(ctx context.Context, model string, instances int, save bool) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpScale, Model: model, Instances: instances, Save: save})
	return err
}

// HandOver has the broker let this process, another broker, put its own socket at the
// path. Then the broker finishes what it has accepted, and ends. If this process ends
// before that, or does not take the path within ten seconds, the broker goes on.
func (c *Client) HandOver(ctx context.Context) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpHandOver})
	return err
}

// Changed waits until a model has appeared or gone, has got its first worker
// or lost its last, since the count that an earlier call returned. With 0 it
// returns at once. It returns the count to ask with the next time; that of
// another broker, after a restart, is always another one.
func (c *Client) Changed(ctx context.Context, since uint64) (now uint64, err error) {
	for {
		rep, err := c.ask(ctx, &control.Request{Op: control.OpWatch, Since: since})
		if err != nil {
			return 0, err
		}
		if rep.Changes != since {
			return rep.Changes, nil
		}
	}
}

// ask is call for what changes nothing: it may be asked again, so a broker that is
// being replaced is no error.
func (c *Client) ask(ctx context.Context, req *control.Request) (*control.Reply, error) {
	return attach.Ask(ctx, c.socket, req)
}

func (c *Client) call(ctx context.Context, req *control.Request) (*control.Reply, error) {
	return attach.CallOnce(ctx, c.socket, req)
}
