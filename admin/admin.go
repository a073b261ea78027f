// SPDX-License-Identifier: Apache-2.0

// Package admin asks a broker about itself and changes its policies, as the commands
// `ringbatch models`, `stats`, `set` and `doctor` do.
//
//	a := admin.New("")                  // the default socket
//	list, err := a.Models(ctx)
//	s, err := a.Stats(ctx)
//	err = a.Set(ctx, "resnet50", policy.New(policy.WaitTime(3*time.Millisecond)))
//
// A program that follows the broker's models waits for changes:
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

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
)

// Client calls one broker. Each call makes a new connection, so a Client needs no
// Close, outlives a restart of the broker, and is safe for many goroutines.
type Client struct{ socket string }

// New returns a client of the broker at this socket, without connecting. An empty
// path means $RINGBATCH_SOCKET, or else the user's default.
func New(socket string) *Client { return &Client{control.SocketPath(socket)} }

// Socket returns the path of the broker's socket.
func (c *Client) Socket() string { return c.socket }

// Broker is the broker that answered a Ping.
type Broker struct {
	Pid   int
	Epoch uint64 // changes with each restart
}

// Ping returns when the broker's loops have answered.
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
	Ready     int           // workers that can be counted on: see Client.Ready
	NotReady  string        // why no worker is ready
	Asleep    bool          // it has no workers, and a request starts some
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
		sig, err := tensor.ParseSignature(m.Inputs, m.Outputs, m.State...)
		if err != nil {
			return nil, nil, fmt.Errorf("model %q: %w", m.Name, err)
		}
		list = append(list, Model{Name: m.Name, Signature: sig, Policy: m.Policy, Workers: m.Workers, Clients: m.Clients,
			Ready: m.ReadyWorkers, NotReady: m.NotReady, Asleep: m.Asleep})
	}
	slices.SortFunc(list, func(x, y Model) int { return strings.Compare(x.Name, y.Name) })
	return list, rep, nil
}

// Stats returns the broker's statistics.
func (c *Client) Stats(ctx context.Context) (*stats.Broker, error) {
	return askFor[stats.Broker](ctx, c, &control.Request{Op: control.OpStats})
}

// StatsJSON returns Stats as the broker sent it: a newer broker may count more than
// package stats of this build knows.
func (c *Client) StatsJSON(ctx context.Context) ([]byte, error) {
	rep, err := c.ask(ctx, &control.Request{Op: control.OpStats})
	if err != nil {
		return nil, err
	}
	return rep.Stats, nil
}

// Batches returns the finished batches of a model after the first since, as far as
// the broker remembers them.
func (c *Client) Batches(ctx context.Context, model string, since uint64) (*stats.Batches, error) {
	return askFor[stats.Batches](ctx, c, &control.Request{Op: control.OpBatches, Model: model, Since: since})
}

// Trace records the requests of a model for a duration.
func (c *Client) Trace(ctx context.Context, model string, d time.Duration) (*stats.Trace, error) {
	return askFor[stats.Trace](ctx, c, &control.Request{Op: control.OpTrace, Model: model, Millis: int(d.Milliseconds())})
}

func askFor[T any](ctx context.Context, c *Client, req *control.Request) (*T, error) {
	rep, err := c.ask(ctx, req)
	if err != nil {
		return nil, err
	}
	v := new(T)
	if err := json.Unmarshal(rep.Stats, v); err != nil {
		return nil, fmt.Errorf("%s: %w", req.Op, err)
	}
	return v, nil
}

// Set changes settings of a running model's policy: all of them, or none if one is
// refused.
func (c *Client) Set(ctx context.Context, model string, settings policy.Policy) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpSet, Model: model, Policy: settings})
	return err
}

// SetAndSave is Set for later starts of the broker as well: the broker saves the
// settings beside its configuration file.
func (c *Client) SetAndSave(ctx context.Context, model string, settings policy.Policy) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpSet, Model: model, Policy: settings, Save: true})
	return err
}

// Restart replaces the worker processes that the broker started for a model, one by
// one. Each ends after its successor has attached. Restart returns when all are
// replaced, or when a successor does not come up.
func (c *Client) Restart(ctx context.Context, model string) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpRestart, Model: model})
	return err
}

// Scale makes the broker run that many instances of a model's worker process. It
// returns when they have attached, or ended. save: as in SetAndSave.
func (c *Client) Scale(ctx context.Context, model string, instances int, save bool) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpScale, Model: model, Instances: instances, Save: save})
	return err
}

// Sleep ends the worker processes that the broker started for a model. It returns when they
// have ended. The ring, its clients and its sequences stay, and the next request starts them.
func (c *Client) Sleep(ctx context.Context, model string) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpSleep, Model: model})
	return err
}

// Wake starts the worker processes of a model that sleeps. It returns when they have attached.
func (c *Client) Wake(ctx context.Context, model string) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpWake, Model: model})
	return err
}

// HandOver lets this process, another broker, put its socket at the broker's path.
// Then the broker finishes its accepted requests, and ends. The broker goes on if
// this process ends before, or does not take the path within ten seconds.
func (c *Client) HandOver(ctx context.Context) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpHandOver})
	return err
}

// Withdraw withdraws the latest version of a model's weights: workers go on with the one
// before.
func (c *Client) Withdraw(ctx context.Context, model string, version uint32) error {
	_, err := c.call(ctx, &control.Request{Op: control.OpWithdraw, Model: model, Since: uint64(version)})
	return err
}

// Changed waits until a model has appeared or gone, or has got its first worker or
// lost its last, since the count that an earlier call returned. With 0 it returns at
// once. It returns the count for the next call, which differs after a restart of
// the broker.
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

// ask is call for questions. They are repeated when a broker is being replaced.
func (c *Client) ask(ctx context.Context, req *control.Request) (*control.Reply, error) {
	return attach.Ask(ctx, c.socket, req)
}

func (c *Client) call(ctx context.Context, req *control.Request) (*control.Reply, error) {
	return attach.CallOnce(ctx, c.socket, req)
}
