// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

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
		return b.super.Restart(context.Background(), req.Model)
	}
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

// defaultReplaceTime is how long another broker may take to put its socket at the path.
const defaultReplaceTime = 10 * time.Second

// handOver gives the lock up, so that another broker can put its socket at the path. Until
// it has, this one serves as ever. If the other one dies before that, or takes too long,
// this one takes the lock back and goes on.
func (b *conversation) handOver() error {
	select {
	case <-b.listening:
	default:
		return fmt.Errorf("%w: this broker has not got the socket yet", status.ErrInvalid)
	}
	if b.noPidfd != nil {
		return b.noPidfd
	}
	if !b.handing.CompareAndSwap(false, true) {
		return fmt.Errorf("%w: another broker already takes over", status.ErrBrokerRunning)
	}
	b.log.Info("another broker takes over: the lock is given up", "pid", b.cred.Pid)
	b.listener.giveLock()
	successor := dup(b.pidfd)
	go func() {
		defer closeFD(successor)
		b.awaitSuccessor(successor)
	}()
	return nil
}

// awaitSuccessor has Serve drain once another broker's socket is at the path: what was
// accepted finishes here. Clients and workers are disconnected after it, and find
// the other broker.
func (b *Broker) awaitSuccessor(pidfd int) {
	for end := time.Now().Add(b.cfg.replaceTime); !b.listener.isTaken(); time.Sleep(time.Millisecond) {
		if time.Now().Before(end) && !hasEnded(pidfd) {
			continue
		}
		switch err := b.listener.takeLock(); {
		case err == nil:
			b.listener.removeStale()
			b.log.Warn("the other broker has not taken the socket over: this one goes on")
			b.handing.Store(false)
			return
		case errors.Is(err, net.ErrClosed): // this one has ended
			return
		} // else the other broker is just taking the path
	}
	b.log.Info("another broker has the socket")
	b.super.LeaveMPS()
	b.models.drain()
	close(b.handedTo)
	_ = b.listener.UnixListener.Close()
}

// isHandedOver tells whether another broker has the socket.
func (b *Broker) isHandedOver() bool {
	select {
	case <-b.handedTo:
		return true
	default:
		return false
	}
}
