// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/client"
)

const (
	LookupInterval = lookupInterval
	MaxTextBytes   = maxTextBytes
	LeastRate      = leastRate
)

var NewAuthority = newAuthority

func (c *Config) SetEndDelay(ends <-chan struct{}) { c.endDelay = ends }

// Used counts the bytes of all callers.
func (g *Gateway) Used() *atomic.Int64 { return &g.Limits.used }

// BytesOf are the bytes of each caller.
func (g *Gateway) BytesOf() map[string]int64 {
	g.Limits.mu.Lock()
	defer g.Limits.mu.Unlock()
	all := map[string]int64{}
	for name, u := range g.Limits.byName {
		all[name] = u.bytes.Load()
	}
	return all
}

func (g *Gateway) Refresh(ctx context.Context) { g.Models.refreshSoon(ctx) }

func (g *Gateway) Epoch() uint64 {
	g.Models.asking.Lock()
	defer g.Models.asking.Unlock()
	return g.Models.epoch
}

// TargetsOf counts the models of an alias.
func (g *Gateway) TargetsOf(alias string) int { return len((*g.Models.routes.Load())[alias].To) }

// SingleClient is the ring client of callers in good standing.
func (k *Model) SingleClient() *client.Client { return k.single.live.Load().Client }

// AllFree returns an error if a slot of the model's clients is in use.
func (k *Model) AllFree() error {
	lanes := []*lane{&k.single, &k.many, &k.relayed, &k.sequences}
	for i := range k.suspects.lanes {
		lanes = append(lanes, &k.suspects.lanes[i])
	}
	for _, l := range lanes {
		if a := l.live.Load(); a != nil {
			if err := wholeWindow(a.Client, k.variableInputs); err != nil {
				return fmt.Errorf("%s: %w", k.Name, err)
			}
		}
	}
	return nil
}

// wholeWindow claims every slot of a client, in requests of a batch each.
func wholeWindow(c *client.Client, variable int) error {
	dims := make([]int, variable)
	for i := range dims {
		dims[i] = 1
	}
	window := c.Model().Window
	for left := window; left > 0; {
		n := min(left, window, c.Model().MaxBatchSize)
		q, err := c.TryClaim(n, dims...)
		if err != nil {
			return fmt.Errorf("%d of %d slots are not free: %w", left, window, err)
		}
		defer q.Release()
		left -= n
	}
	return nil
}
