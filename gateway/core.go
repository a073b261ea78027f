// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"google.golang.org/grpc/health"
)

// gateCore is what the doors of one broker have in common.
type gateCore struct {
	cfg     Config
	log     *slog.Logger
	admin   *admin.Client
	models  *models
	regions *regions
	limits  *limits
	secrets *secrets
	health  *health.Server

	draining atomic.Int32  // drainState
	refuses  chan struct{} // closed when it is refusing
	inFlight atomic.Int64
	pinged   pinged
	collects rarely
}

const (
	notDraining = iota
	notReady    // readiness is false, requests are still taken
	refusing    // they are not any more
)

// newCore checks the configuration and reads its files.
func newCore(cfg Config) (*gateCore, error) {
	cfg.fill()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	g := &gateCore{cfg: cfg, log: cfg.Logger, admin: admin.New(cfg.Socket), regions: newRegions(cfg.SystemSharedMemory)}
	g.limits = newLimits(&cfg)
	g.health, g.refuses = health.NewServer(), make(chan struct{})
	g.models = newModels(g)
	var err error
	if g.secrets, err = loadSecrets(g); err != nil {
		return nil, err
	}
	return g, nil
}

// beginRequest admits an inference of a caller; endRequest follows.
func (g *gateCore) beginRequest(who *caller) error {
	if g.draining.Load() == refusing {
		return errDraining
	}
	if err := g.limits.beginRequest(who.use); err != nil {
		return err
	}
	g.inFlight.Add(1)
	return nil
}

func (g *gateCore) endRequest(who *caller) {
	g.limits.endRequest(who.use)
	g.inFlight.Add(-1)
}

// watch follows the broker's models, and files that change, until ctx ends.
func (g *gateCore) watch(ctx context.Context) {
	go g.models.watch(ctx)
	t := time.NewTicker(g.cfg.pace.reload)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			g.secrets.reload()
		}
	}
}

// closeModels gives back what the gateway has of the broker and of its callers.
func (g *gateCore) closeModels() {
	for _, k := range g.models.list() {
		k.close()
	}
	g.regions.closeAll()
}

// beginDrain makes the gateway not ready, and after its delay refuse requests.
func (g *gateCore) beginDrain() {
	g.draining.Store(notReady)
	g.tellHealth()
	g.log.Info("draining: not ready any more", "delay", g.cfg.DrainDelay, "in_flight", g.inFlight.Load())
	select {
	case <-time.After(g.cfg.DrainDelay):
	case <-g.cfg.endDelay:
	}
	g.draining.Store(refusing)
	close(g.refuses) // ends streams, which would be waited for
}

// answerTime is how long a caller may take to read an answer, which keeps slots
// of the ring.
func (g *gateCore) answerTime(size int) time.Duration {
	return g.cfg.pace.answer + time.Duration(size)*time.Second/time.Duration(g.cfg.pace.rate)
}

// collectGarbage finds buffers that the gRPC transport forgot, and so the slots
// that they lie in.
func (g *gateCore) collectGarbage() { g.collects.Do(runtime.GC) }

// awaitIdle is closed when no request has been in flight for stallPatience.
func (g *gateCore) awaitIdle(ctx context.Context) <-chan struct{} {
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
