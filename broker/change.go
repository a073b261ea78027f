// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// setAndSave is OpSet.
func (b *Broker) setAndSave(req *control.Request) error {
	if err := b.checkSave(req); err != nil {
		return err
	}
	if err := b.set(req.Model, req.Policy); err != nil || !req.Save {
		return err
	}
	return b.save(req)
}

// changeWorkers is OpRestart and OpScale. It returns when the processes are as
// they were asked to be.
func (b *Broker) changeWorkers(req *control.Request) error {
	if err := b.checkSave(req); err != nil {
		return err
	}
	m, _, err := b.models.takeStage(req.Model)
	if err != nil {
		return err
	}
	defer b.models.leave(m)
	if req.Op == control.OpRestart {
		b.log.Info("worker processes are replaced one by one", "model", req.Model)
		return b.super.Restart(context.Background(), req.Model)
	}
	b.log.Info("number of worker processes changes", "model", req.Model, "instances", req.Instances)
	if err := b.super.Scale(context.Background(), req.Model, req.Instances); err != nil || !req.Save {
		return err
	}
	return b.save(req)
}

var errNotSaved = fmt.Errorf("%w: nothing can be saved: the broker runs without --config", status.ErrInvalid)

// checkSave refuses what could not be kept before it is done.
func (b *Broker) checkSave(req *control.Request) error {
	if req.Save && b.cfg.Save == nil {
		return errNotSaved
	}
	return nil
}

func (b *Broker) save(req *control.Request) error {
	if err := b.cfg.Save(req.Model, req.Policy, req.Instances); err != nil {
		return fmt.Errorf("changed, but not saved: %w", err)
	}
	return nil
}

// takeOver brings the workers up, and then has the broker that has the socket
// give it up: while they start it serves. If one of them does not come up, the
// socket stays where it is.
func (b *Broker) takeOver(ctx context.Context) error {
	workers := b.declaredWorkers()
	b.log.Info("starting the workers before the socket is taken over", "socket", b.cfg.Socket)
	if err := b.super.WarmUp(ctx, b.listener.beside, b.cfg.MPS, workers...); err != nil {
		return fmt.Errorf("%w; the broker that runs was left alone", err)
	}
	if err := b.cfg.TakeOver(ctx); err != nil {
		return err
	}
	if err := b.listener.take(true); err != nil {
		return err
	}
	b.listens()
	b.super.StartClients(workers...)
	return nil
}

// handOver gives the socket and its lock up, so that another broker can have
// them, and has Serve drain: what was accepted finishes here. Clients and
// workers are disconnected after it, and find the other broker.
func (b *Broker) handOver(replaced bool) {
	b.handed.Do(func() {
		b.log.Info("another broker takes over: the socket is given up")
		b.models.drain()
		b.super.LeaveMPS()
		b.listener.giveUp(replaced)
		close(b.handedTo)
	})
}

// awaitSuccessor returns true once another broker has the socket that it asked for, or
// could have had it; false at once if none has asked.
func (b *Broker) awaitSuccessor(ctx context.Context) bool {
	if !b.listener.given.Load() {
		return false
	}
	select {
	case <-b.listener.taken:
	case <-ctx.Done():
	}
	return true
}
