// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
)

// Ready is nil if every served model would answer, by the rule of
// admin.Client.Ready. The broker is asked at most every lookupInterval.
func (g *Gateway) Ready() error {
	if err := g.askBroker(); err != nil {
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

// ModelReady is Ready for one model.
func (g *Gateway) ModelReady(k *Model) error {
	if err := g.askBroker(); err != nil {
		return err
	}
	return k.unready()
}

// askBroker returns nil if the broker answers and neither side drains.
func (g *Gateway) askBroker() error {
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

// current returns the present model of k's name, whose signature may have changed.
func (m *models) current(k *Model) *Model {
	if now := (*m.byName.Load())[k.Name]; now != nil {
		return now
	}
	return k
}

// pinged is the result of the last ping of the broker's loops.
type pinged struct {
	mu  sync.Mutex
	at  time.Time
	err error
}

// Live returns an error if the broker's loops do not answer. A missing broker makes
// the gateway not ready, but a restart of the gateway would not help.
func (g *Gateway) Live() error {
	p := &g.pinged
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.at) < lookupInterval {
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

// updateHealth updates the gRPC health service (grpc.health.v1) for Envoy,
// Kubernetes and gRPC clients that watch: "" and the service are the gateway,
// other names are models. It does not ask the broker.
func (g *Gateway) updateHealth() {
	broken := *g.Models.broker.Load()
	if g.Draining.Load() != NotDraining {
		broken = ErrDraining
	}
	say := func(service string, well bool) {
		state := healthpb.HealthCheckResponse_NOT_SERVING
		if well && broken == nil {
			state = healthpb.HealthCheckResponse_SERVING
		}
		g.Health.SetServingStatus(service, state)
	}
	list := g.Models.List()
	all := len(list) > 0
	for _, k := range list {
		well := k.unready() == nil
		all = all && well
		say(k.Name, well)
	}
	for name, r := range *g.Models.routes.Load() {
		k := r.main()
		say(name, k != nil && k.unready() == nil)
	}
	say("", all)
	say(oip.GRPCInferenceService_ServiceDesc.ServiceName, all)
}
