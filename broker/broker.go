// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
)

// Broker serves models. Make one with New.
type Broker struct {
	cfg       Config
	log       *slog.Logger
	epoch     uint64
	started   time.Time
	loops     []*loop
	models    *registry
	listener  *listener
	super     *supervise.Supervisor
	conns     conns
	reloading sync.Mutex    // one Reload at a time
	ending    atomic.Bool   // the context of Serve has ended
	handing   atomic.Bool   // another broker takes over, or has
	listening chan struct{} // closed when this one has it
	handedTo  chan struct{} // closed when another broker has the socket
	applied   chan struct{} // closed when the processes are as the last Reload declared them; nil before the first
	offenders offenders
	users     *users
	room      func(bytes int64) error // checkMemory; simulated worlds take no notice of this machine's
	refusals  refusals
	answering chan struct{} // has a place for each call that is being answered
}

// New checks the configuration, takes the socket and makes the declared
// models. Serve must follow.
func New(cfg Config) (_ *Broker, err error) {
	cfg.fill()
	if cfg.MaxClients < 0 {
		return nil, fmt.Errorf("%w: max_clients is %d, must be positive", status.ErrInvalid, cfg.MaxClients)
	}
	if cfg.Loops < 1 || cfg.Loops > MaxLoops {
		return nil, fmt.Errorf("%w: loops is %d, must be 1..%d", status.ErrInvalid, cfg.Loops, MaxLoops)
	}
	for i := range cfg.Workers {
		if err := cfg.Workers[i].Fill(); err != nil {
			return nil, err
		}
	}
	if err := cfg.Limits.fill(cfg.MaxClients, cfg.shared()); err != nil {
		return nil, err
	}
	if err := checkKernel(); err != nil {
		return nil, err
	}
	b := &Broker{cfg: cfg, log: quietly(cfg.Logger), users: newUsers(cfg.Limits, cfg.MaxClients), room: checkMemory, epoch: uint64(time.Now().UnixNano()), started: time.Now(), listening: make(chan struct{}), handedTo: make(chan struct{}), answering: make(chan struct{}, answersAtOnce)}
	defer func() {
		if err != nil {
			for _, l := range b.loops {
				close(l.ended)
			}
			b.release()
		}
	}()
	for i := range cfg.Loops {
		l, err := newLoop(i, b)
		if err != nil {
			return nil, err
		}
		l.parker.Alone, l.killPeer = cfg.Alone, b.killPeer
		b.loops = append(b.loops, l)
	}
	b.models = newRegistry(b.epoch, b.loops)
	if err := checkNames(cfg.Models); err != nil {
		return nil, err
	}
	for _, mc := range cfg.Models {
		m, _, err := b.models.reserve(mc.Name)
		if err != nil {
			return nil, err
		}
		if err := m.build(b, mc); err != nil {
			return nil, err
		}
		b.models.place(m)
		m.loop.adopt(m.ring) // which does not run yet
		b.models.publish(m, false)
	}
	if err := b.models.checkAliases(cfg.Aliases, nil); err != nil {
		return nil, err
	}
	b.models.putAliases(cfg.Aliases)
	b.super = supervise.New(b.log, cfg.Socket)
	b.super.Faulted = b.dropDevices
	if cfg.TakeOver != nil {
		b.listener, err = listenBeside(cfg.Socket, cfg.OpenFolder)
	} else if b.listener, err = listen(cfg.Socket, cfg.OpenFolder); err == nil {
		b.listens()
	}
	return b, err
}

func (b *Broker) listens() {
	b.log.Info("broker listening", "socket", b.cfg.Socket, "pid", os.Getpid(), "epoch", b.epoch, "loops", b.cfg.Loops)
	close(b.listening)
}

// Listening is closed once the broker has its socket.
func (b *Broker) Listening() <-chan struct{} { return b.listening }

// Socket is where the broker listens.
func (b *Broker) Socket() string { return b.cfg.Socket }

// Serve runs until ctx ends, then drains: requests that were accepted finish,
// new ones get ErrDraining, for at most Config.DrainTime. It returns nil
// after a clean drain.
func (b *Broker) Serve(ctx context.Context) error {
	defer b.super.Wait()
	defer b.release()
	defer b.super.Stop() // before release: workers are told to end, not left to look for a broker
	drained := make(chan struct{}, len(b.loops))
	failed := make(chan error, len(b.loops))
	var running sync.WaitGroup
	for _, l := range b.loops {
		l.drained = func() { drained <- struct{}{} }
		running.Go(func() {
			if err := l.run(); err != nil {
				failed <- err
			}
		})
	}
	defer running.Wait()
	defer func() {
		for _, l := range b.loops {
			l.post(l.stop)
		}
	}()
	go b.accept()
	if b.cfg.TakeOver == nil {
		b.super.Start(b.cfg.MPS, b.declaredWorkers()...)
	} else if err := b.takeOver(ctx); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	select {
	case <-ctx.Done():
		b.ending.Store(true)
		if err := b.stopClients(failed); err != nil {
			return err
		}
	case <-b.handedTo:
	case err := <-failed:
		return err
	}
	return b.drain(drained, failed)
}

// stopClients ends the gateway, while its models still answer: it takes its time
// to tell load balancers, and to finish what it has accepted.
func (b *Broker) stopClients(failed <-chan error) error {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.super.StopClients()
	}()
	select {
	case <-ended:
		return nil
	case err := <-failed:
		return err
	}
}

// drain has the loops finish what was accepted.
func (b *Broker) drain(drained <-chan struct{}, failed <-chan error) error {
	b.log.Info("draining")
	b.models.drain()
	for _, l := range b.loops {
		l.do(l.drain)
	}
	for _, l := range b.loops {
		l.do(func() {}) // the round in which it was told to drain has ended
	}
	over := time.After(b.cfg.DrainTime)
	look := time.NewTicker(unservedPoll)
	defer look.Stop()
	for left := len(b.loops); left > 0; {
		select {
		case <-drained:
			left--
		case err := <-failed:
			return err
		case <-look.C:
			grace, mayServe := b.cfg.WorkerGrace, b.super.MayServe
			handed := b.isHandedOver()
			if handed { // who is started now finds the other broker
				grace, mayServe = 0, func(string) bool { return false }
			}
			for _, l := range b.loops {
				l.post(func() {
					l.endUnserved(grace, mayServe)
					if handed {
						l.sendIdleClientsOn()
					}
				})
			}
		case <-over:
			if len(drained) == left { // there was no time, and none was needed
				continue
			}
			b.log.Warn("drain time is over, requests are left unfinished")
			return nil
		}
	}
	b.log.Info("drained")
	return nil
}

// KillWorkers is for one who does not wait for Serve to return: worker processes are
// told to end, and killed if they do not. It takes a few seconds at most; true if
// none is left, nor MPS if it was started for them.
func (b *Broker) KillWorkers() bool {
	over := make(chan struct{})
	go func() {
		defer close(over)
		b.super.Hurry()
		b.super.Wait()
	}()
	select {
	case <-over:
		return true
	case <-time.After(killTime):
		return false
	}
}

// killTime is longer than what a supervisor in a hurry gives its workers.
const killTime = 4 * time.Second

// declaredWorkers are the processes to start, each model's and those that
// belong to none.
func (b *Broker) declaredWorkers() []supervise.Group {
	groups := []supervise.Group{{Workers: b.cfg.Workers}}
	for i := range b.cfg.Models {
		groups = append(groups, b.cfg.Models[i].groups()...)
	}
	return groups
}

func (b *Broker) offended(p process) { b.offenders.add(p) }

func (b *Broker) workerCame(pid int, first bool) (spare bool) {
	b.super.Attached(pid)
	if first {
		b.models.changes.note()
		go b.models.evenOutAll() // not on the loop: it may move many clients
	}
	return b.super.RoleOf(pid)
}

func (b *Broker) workerLeft(pid int, withBatch, last bool) (replace bool) {
	if last {
		b.models.changes.note()
		go b.models.evenOutAll()
	}
	return b.super.Left(pid, withBatch)
}

// killPeer ends a worker's process. Under MPS its kernels are ended first, which may take
// seconds and is not done on the loop: a client that is killed while a kernel of it
// runs breaks the contexts of the other workers.
func (b *Broker) killPeer(p *peer) error {
	if !b.super.UsesMPS(p.pid) {
		return p.kill()
	}
	if err := p.signal(0); err != nil {
		return err
	}
	fd := dup(p.pidfd)
	if fd < 0 {
		return p.kill()
	}
	go func() {
		defer closeFD(fd)
		b.super.TerminateClient(p.pid)
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}()
	return nil
}

// dropDevices gives the rings' device memory back after it was lost. Clients that have it
// mapped are disconnected; the next worker allocates some, and they attach again.
func (b *Broker) dropDevices() {
	for _, l := range b.loops {
		l.do(func() {
			for r := range l.rings {
				r.loseDevice()
			}
		})
	}
}

func (b *Broker) promoted(spare, lost int) { b.super.Promoted(spare, lost) }

// release gives everything back: nothing of a broker outlives it. Its loops
// have ended.
func (b *Broker) release() {
	if b.listener != nil {
		b.listener.close()
	}
	b.conns.close() // first: who is just attaching touches a ring
	b.refusals.close()
	for _, l := range b.loops {
		l.releaseRings()
	}
	for _, l := range b.loops {
		l.close()
	}
}
