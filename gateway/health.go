package gateway

import (
	"strings"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// The gRPC health service (grpc.health.v1): "" is the gateway, any other name
// a model. It is for Envoy, Kubernetes and gRPC clients that watch; like HTTP's
// probes it asks for no token.

// tellHealth updates what those who watch are told.
func (g *Gateway) tellHealth() {
	say := func(service string, err error) {
		state := healthpb.HealthCheckResponse_SERVING
		if err != nil {
			state = healthpb.HealthCheckResponse_NOT_SERVING
		}
		g.health.SetServingStatus(service, state)
	}
	say("", g.ready())
	for _, k := range g.models.list() {
		say(k.name, g.modelReady(k))
	}
}

func isHealthCheck(method string) bool { return strings.HasPrefix(method, "/grpc.health.v1.Health/") }
