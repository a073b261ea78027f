// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/status"
)

// Anybody may ask for these, as often as they like: the broker is asked at most
// every lookupInterval because of it.

// Ready is nil if every model that is served here would answer: the rule of
// admin.Client.Ready.
func (g *Gateway) Ready() error {
	if err := g.welcome(); err != nil {
		return err
	}
	list := g.Models.List()
	if len(list) == 0 {
		return Refuse(http.StatusServiceUnavailable, codes.Unavailable, "the broker has no model yet")
	}
	for _, k := range list {
		if err := k.unready(); err != nil {
			return err
		}
	}
	return nil
}

// ModelReady is ready for one model.
func (g *Gateway) ModelReady(k *Model) error {
	if err := g.welcome(); err != nil {
		return err
	}
	return k.unready()
}

// welcome is nil if the broker answers and neither side drains.
func (g *Gateway) welcome() error {
	if g.Draining.Load() != NotDraining {
		return ErrDraining
	}
	g.Models.refresh(context.Background())
	return *g.Models.broker.Load()
}

func (k *Model) unready() error {
	if now := k.G.Models.current(k); !now.ready() {
		return Refuse(http.StatusServiceUnavailable, codes.Unavailable, "model %q is not ready: %s", now.Name, now.info.Load().notReady)
	}
	return nil
}

// current is the model of the same name as it is now: its signature may have
// changed since k was looked up.
func (m *models) current(k *Model) *Model {
	if now := (*m.byName.Load())[k.Name]; now != nil {
		return now
	}
	return k
}

// pinged is whether the broker's loops answered when they were asked last.
type pinged struct {
	mu  sync.Mutex
	at  time.Time
	err error
}

// Live is nil unless a broker is there whose loops do not answer. That there is
// none makes the gateway not ready, and is nothing that its restart would mend.
func (g *Gateway) Live() error {
	p := &g.pinged
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.at) < LookupInterval {
		return p.err
	}
	p.err = askTwice(context.Background(), func(ctx context.Context) error {
		_, err := g.admin.Ping(ctx)
		return err
	})
	for _, fine := range []error{status.ErrNoBroker, status.ErrBrokerGone, status.ErrDraining} {
		if errors.Is(p.err, fine) {
			p.err = nil
		}
	}
	p.at = time.Now()
	return p.err
}
