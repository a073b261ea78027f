// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
)

// drain first says that the gateway is not ready, so that load balancers send
// nothing new here, and then lets accepted requests finish.
func (g *Gateway) drain(rpc *grpc.Server) error {
	g.draining.Store(notReady)
	g.tellHealth()
	g.log.Info("draining: not ready any more", "delay", g.cfg.DrainDelay, "in_flight", g.inFlight.Load())
	select {
	case <-time.After(g.cfg.DrainDelay):
	case <-g.cfg.endDelay:
	}
	g.draining.Store(refusing)
	close(g.refuses) // ends streams, which would be waited for
	ctx, cancel := context.WithTimeout(context.Background(), g.cfg.DrainTime)
	defer cancel()
	ended := make(chan struct{}, 2)
	go func() {
		if g.web != nil {
			_ = g.web.Shutdown(ctx)
		}
		ended <- struct{}{}
	}()
	go func() {
		if rpc != nil {
			rpc.GracefulStop()
		}
		ended <- struct{}{}
	}()
	idle := g.awaitIdle(ctx)
	for range 2 {
		select {
		case <-ended:
		case <-idle: // what is left are callers that do not finish their requests
			return nil
		case <-ctx.Done():
			return fmt.Errorf("draining: %d requests did not finish in %v", g.inFlight.Load(), g.cfg.DrainTime)
		}
	}
	return nil
}

// awaitIdle is closed when no request has been in flight for stallPatience.
func (g *Gateway) awaitIdle(ctx context.Context) <-chan struct{} {
	idle := make(chan struct{})
	go func() {
		busy := time.Now()
		for time.Since(busy) < g.cfg.pace.stall {
			if g.inFlight.Load() > 0 {
				busy = time.Now()
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(idleCheck):
			}
		}
		close(idle)
	}()
	return idle
}
