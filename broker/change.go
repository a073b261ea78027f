// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// Changes while the broker runs, and the hand-over of the socket to another broker.

// changeModel answers OpSet, OpRestart and OpScale after the change.
func (b *Broker) changeModel(req *control.Request) (err error) {
	if req.Save && b.cfg.Save == nil {
		return errNotSaved
	}
	if req.Op == control.OpSet {
		err = b.setPolicy(req.Model, req.Policy)
	} else {
		err = b.changeWorkers(req)
	}
	if err != nil || !req.Save || req.Op == control.OpRestart {
		return err
	}
	return notSaved(b.cfg.Save(req.Model, req.Policy, req.Instances))
}

func (b *Broker) changeWorkers(req *control.Request) error {
	m, _, err := b.models.takeStage(req.Model)
	if err != nil {
		return err
	}
	defer b.models.leaveModel(m)
	if req.Op == control.OpRestart {
		return b.super.Restart(context.Background(), req.Model)
	}
	return b.staff.scale(context.Background(), m, req.Model, req.Instances)
}

var errNotSaved = fmt.Errorf("%w: nothing can be saved: the broker runs without --config", status.ErrInvalid)

func notSaved(err error) error {
	if err != nil {
		err = fmt.Errorf("changed, but not saved: %w", err)
	}
	return err
}

// takeOver starts the workers while the old broker serves, and then takes the socket. If
// a worker does not come up, the old broker keeps the socket.
func (b *Broker) takeOver(ctx context.Context) error {
	workers := b.declaredWorkers()
	b.log.Info("starting the workers before the socket is taken over", "socket", b.cfg.Socket)
	if err := b.super.WarmUp(ctx, b.listener.beside, b.cfg.MPS, workers...); err != nil {
		return fmt.Errorf("%w; the broker that runs was left alone", err)
	}
	if err := b.cfg.TakeOver(ctx); err != nil {
		return err
	}
	if err := b.listener.takeSocket(true); err != nil {
		return err
	}
	b.announceSocket()
	b.super.StartClients(workers...)
	return nil
}

// defaultReplaceTime is how long another broker may take to put its socket at the path.
const defaultReplaceTime = 10 * time.Second

// handOver gives the lock up, so that another broker can put its socket at the path. This
// broker serves until then. If the other broker dies before, or takes too long, this one
// takes the lock back and goes on.
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
	successor := engine.Dup(b.pidfd)
	go func() {
		defer engine.CloseFD(successor)
		b.awaitSuccessor(successor)
	}()
	return nil
}

// awaitSuccessor has Serve drain once another broker's socket is at the path. After that,
// clients and workers are disconnected, and find the other broker.
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
	b.models.refuseNew()
	close(b.handedTo)
	_ = b.listener.UnixListener.Close()
}

func (b *Broker) isHandedOver() bool {
	select {
	case <-b.handedTo:
		return true
	default:
		return false
	}
}

// setPolicy changes a model's policy, whole or not at all.
func (b *Broker) setPolicy(name string, p policy.Policy) error {
	if err := p.CheckLive(); err != nil {
		return err
	}
	m, s, err := b.models.takeStage(name)
	if err != nil {
		return err
	}
	defer b.models.leaveModel(m)
	if m.isPipeline {
		if err := checkStageKeys(p); err != nil {
			return err
		}
	}
	return m.changeStage(s, func(now ModelConfig, settings *policy.Settings) (ModelConfig, error) {
		// A fixed number of levels: a setting of another level must not add one.
		now.Policy = p.Over(policy.New(policy.Priorities(settings.LevelCount())).Over(now.Policy))
		return now, nil
	})
}

// changeStage edits a stage's configuration and has the loop apply it. Texts, which may
// be long, are parsed here and not on the loop.
func (m *model) changeStage(s *stage, edit func(now ModelConfig, settings *policy.Settings) (ModelConfig, error)) error {
	s.changing.Lock()
	defer s.changing.Unlock()
	next, err := edit(s.cfg, s.InForce())
	if err != nil {
		return err
	}
	force, err := next.Policy.Resolve(next.Signature.Inputs)
	if err != nil {
		return err
	}
	if !m.ring.Do(func() { err = s.SetPolicy(force) }) {
		return status.ErrDraining
	}
	if err != nil {
		return err
	}
	s.cfg = next
	s.log.Info("policy changed", "policy", printable.Text(next.Policy.String(), 1024))
	return nil
}
