// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"google.golang.org/grpc/health"
)

// Gateway is the common part of both doors of one broker.
type Gateway struct {
	Cfg     Config
	Log     *slog.Logger
	admin   *admin.Client
	Models  *models
	Regions *regions
	Limits  *limits
	secrets *secrets
	Health  *health.Server

	sequences sequences
	Draining  atomic.Int32  // drainState
	Refuses   chan struct{} // closed when Draining is Refusing
	InFlight  atomic.Int64
	pinged    pinged
	collects  rarely
}

const (
	NotDraining = iota
	notReady    // requests are still taken
	Refusing    // requests are refused
)

// New checks the configuration and reads its files.
func New(cfg Config) (*Gateway, error) {
	cfg.fill()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	g := &Gateway{Cfg: cfg, Log: cfg.Logger, admin: admin.New(cfg.Socket), Regions: newRegions(cfg.SystemSharedMemory)}
	g.Limits = newLimits(&cfg)
	g.sequences = sequences{idle: cfg.SequenceIdle, byKey: map[sequenceKey]*sequence{}}
	g.Health, g.Refuses = health.NewServer(), make(chan struct{})
	g.Models = newModels(g)
	var err error
	if g.secrets, err = loadSecrets(g); err != nil {
		return nil, err
	}
	return g, nil
}

// BeginRequest admits an inference of a caller. Call EndRequest when it has ended.
func (g *Gateway) BeginRequest(who *Caller) error {
	if g.Draining.Load() == Refusing {
		return ErrDraining
	}
	if err := g.Limits.beginRequest(who.Use); err != nil {
		return err
	}
	g.InFlight.Add(1)
	return nil
}

func (g *Gateway) EndRequest(who *Caller) {
	g.Limits.endRequest(who.Use)
	g.InFlight.Add(-1)
}

// Watch follows the broker's models and the changes of files until ctx ends.
func (g *Gateway) Watch(ctx context.Context) {
	go g.Models.watch(ctx)
	t := time.NewTicker(g.Cfg.Pace.Reload)
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

// CloseModels closes the connections to the broker, and the callers' regions.
func (g *Gateway) CloseModels() {
	g.sequences.closeAll()
	for _, k := range g.Models.List() {
		k.Close()
	}
	g.Regions.closeAll()
}

// BeginDrain makes the gateway not ready, and after its delay refuses requests.
func (g *Gateway) BeginDrain() {
	g.Draining.Store(notReady)
	g.updateHealth()
	g.Log.Info("draining: not ready any more", "delay", g.Cfg.DrainDelay, "in_flight", g.InFlight.Load())
	select {
	case <-time.After(g.Cfg.DrainDelay):
	case <-g.Cfg.endDelay:
	}
	g.Draining.Store(Refusing)
	close(g.Refuses) // ends streams, which the drain would wait for
}

// AnswerTime bounds how long a caller reads an answer, which keeps slots of the ring.
func (g *Gateway) AnswerTime(size int) time.Duration {
	return g.Cfg.Pace.Answer + time.Duration(size)*time.Second/time.Duration(g.Cfg.Pace.Rate)
}

// collectGarbage frees buffers that the gRPC transport forgot, and their slots.
func (g *Gateway) collectGarbage() { g.collects.Do(runtime.GC) }

// AwaitIdle returns a channel that is closed when no request has been in flight for
// Pace.Stall.
func (g *Gateway) AwaitIdle(ctx context.Context) <-chan struct{} {
	idle := make(chan struct{})
	go func() {
		busy := time.Now()
		for time.Since(busy) < g.Cfg.Pace.Stall {
			if g.InFlight.Load() > 0 {
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
