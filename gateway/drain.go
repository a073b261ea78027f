// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"fmt"
)

// drain first says that the gateway is not ready, so that load balancers send
// nothing new here, and then lets accepted requests finish.
func (g *Gateway) drain() error {
	g.core.BeginDrain()
	ctx, cancel := context.WithTimeout(context.Background(), g.core.Cfg.DrainTime)
	defer cancel()
	ended := make(chan struct{}, 2)
	go func() {
		if g.web != nil {
			_ = g.web.Shutdown(ctx)
		}
		ended <- struct{}{}
	}()
	go func() {
		if g.rpc != nil {
			g.rpc.GracefulStop()
		}
		ended <- struct{}{}
	}()
	idle := g.core.AwaitIdle(ctx)
	for range 2 {
		select {
		case <-ended:
		case <-idle: // only callers that do not finish their requests are left
			return nil
		case <-ctx.Done():
			return fmt.Errorf("draining: %d requests did not finish in %v", g.core.InFlight.Load(), g.core.Cfg.DrainTime)
		}
	}
	return nil
}
