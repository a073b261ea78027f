// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
)

// isHealthCheck reports whether a call is a probe, which needs no token.
func isHealthCheck(method string) bool {
	switch method {
	case oip.GRPCInferenceService_ServerLive_FullMethodName, oip.GRPCInferenceService_ServerReady_FullMethodName:
		return true
	}
	return strings.HasPrefix(method, "/grpc.health.v1.Health/")
}

// healthDoor is the health service. It ends watches when the gateway drains.
type healthDoor struct {
	*health.Server
	g *core.Gateway
}

func (d healthDoor) Watch(r *healthpb.HealthCheckRequest, s healthpb.Health_WatchServer) error {
	ctx, cancel := context.WithCancel(s.Context())
	defer cancel()
	go func() {
		defer cancel()
		select {
		case <-d.g.Refuses:
		case <-ctx.Done():
		}
	}()
	err := d.Server.Watch(r, watchStream{s, ctx})
	if d.g.Draining.Load() == core.Refusing {
		return rpcError(core.ErrDraining)
	}
	if ended := s.Context().Err(); ended != nil { // grpc-go says CANCELLED for a deadline, too
		return rpcError(ended)
	}
	return err
}

type watchStream struct {
	grpc.ServerStreamingServer[healthpb.HealthCheckResponse]
	ctx context.Context
}

func (s watchStream) Context() context.Context { return s.ctx }
