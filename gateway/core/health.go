// SPDX-License-Identifier: Apache-2.0

package core

import (
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// The gRPC health service (grpc.health.v1): "" is the gateway, any other name
// a model. It is for Envoy, Kubernetes and gRPC clients that watch; like HTTP's
// probes, and ServerLive and ServerReady, it asks for no token.

// tellHealth updates what those who watch are told: ready and modelReady of
// what is known, without asking the broker.
func (g *Gateway) tellHealth() {
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
	for name, r := range *g.Models.Routes.Load() {
		k := r.main()
		say(name, k != nil && k.unready() == nil)
	}
	say("", all)
}
