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

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
)

// Broker serves models. Make one with New.
type Broker struct {
	cfg       Config
	log       *slog.Logger
	epoch     uint64
	started   time.Time
	loops     []*engine.Loop
	models    *registry
	weights   weights
	listener  *listener
	super     *supervise.Supervisor
	staff     *staff
	serving   sync.WaitGroup // the goroutines of acceptConns and of the connections
	closing   context.Context
	closeAll  context.CancelFunc // closes all connections
	reloading sync.Mutex         // one Reload at a time
	ending    atomic.Bool        // the context of Serve has ended
	handing   atomic.Bool        // another broker takes over, or has
	listening chan struct{}      // closed when this broker has the socket
	handedTo  chan struct{}      // closed when another broker has the socket
	applied   chan struct{}      // closed when the processes are as the last Reload declared; nil before the first
	offenders offenders
	idleness  idleness
	users     *users
	refusals  refusals
	answering chan struct{} // bounds the calls that are answered at a time
}

// New checks the configuration, takes the socket and makes the models, for Serve.
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
	if err := cfg.Limits.fill(cfg.MaxClients, cfg.isShared()); err != nil {
		return nil, err
	}
	if err := checkKernel(); err != nil {
		return nil, err
	}
	b := &Broker{
		cfg:       cfg,
		log:       quietLogger(cfg.Logger),
		users:     newUsers(cfg.Limits, cfg.MaxClients),
		epoch:     uint64(time.Now().UnixNano()),
		started:   time.Now(),
		listening: make(chan struct{}),
		handedTo:  make(chan struct{}),
		answering: make(chan struct{}, answersAtOnce),
		weights:   weights{models: map[string]*modelWeights{}, waiting: map[string][]*weightsPeer{}},
		offenders: offenders{last: map[engine.Process]time.Time{}},
		refusals:  refusals{users: map[uint32]*refused{}},
	}
	b.closing, b.closeAll = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			for _, l := range b.loops {
				l.Abandon()
			}
			b.release()
		}
	}()
	for i := range cfg.Loops {
		l, err := engine.NewLoop(i, outside{b})
		if err != nil {
			return nil, err
		}
		b.loops = append(b.loops, l)
	}
	b.models = newRegistry(b.epoch, b.loops)
	b.models.forgot = func() { go b.weights.forgetUnused(b) } // not on the loop: a publisher that attaches may wait for it
	if err := checkNames(cfg.Models); err != nil {
		return nil, err
	}
	if err := checkStaffing(&cfg); err != nil {
		return nil, err
	}
	for _, mc := range cfg.Models {
		m, _, err := b.models.reserveName(mc.Name)
		if err != nil {
			return nil, err
		}
		if err := m.buildRing(b, mc); err != nil {
			return nil, err
		}
		b.models.placeModel(m)
		m.loop.AdoptRing(m.ring) // the loop does not run yet
		b.models.publishModel(m, false)
	}
	if err := b.models.checkAliases(cfg.Aliases, nil); err != nil {
		return nil, err
	}
	b.models.putAliases(cfg.Aliases)
	b.super = supervise.New(b.log, cfg.Socket)
	b.super.Faulted = b.dropDevices
	b.models.willReturn = b.super.WillReturn
	b.staff = newStaff(b)
	if cfg.TakeOver != nil {
		b.listener, err = listenBeside(cfg.Socket, cfg.OpenFolder)
	} else if b.listener, err = listen(cfg.Socket, cfg.OpenFolder); err == nil {
		b.announceSocket()
	}
	return b, err
}

func (b *Broker) announceSocket() {
	b.log.Info("broker listening", "socket", b.cfg.Socket, "pid", os.Getpid(), "epoch", b.epoch, "loops", b.cfg.Loops)
	close(b.listening)
}

// Listening is closed once the broker has its socket.
func (b *Broker) Listening() <-chan struct{} { return b.listening }

// Socket is the path of the broker's socket.
func (b *Broker) Socket() string { return b.cfg.Socket }

// Serve runs until ctx ends, then drains for at most Config.DrainTime: accepted requests
// finish, new ones get ErrDraining. It returns nil after a clean drain.
func (b *Broker) Serve(ctx context.Context) error {
	defer b.super.Wait()
	defer b.release()
	defer b.super.Stop() // before release, or workers would look for another broker
	b.idleness.count(0)  // from now on
	drained := make(chan struct{}, len(b.loops))
	failed := make(chan error, len(b.loops))
	var running sync.WaitGroup
	for _, l := range b.loops {
		running.Go(func() {
			if err := l.Run(func() { drained <- struct{}{} }); err != nil {
				failed <- err
			}
		})
	}
	defer running.Wait()
	ctx, endServe := context.WithCancel(ctx)
	defer endServe()
	defer func() {
		for _, l := range b.loops {
			l.Stop()
		}
	}()
	b.staff.declareAll()
	b.serving.Go(b.acceptConns)
	if b.cfg.TakeOver == nil {
		b.super.Start(b.cfg.MPS, b.declaredWorkers()...)
	} else if err := b.takeOver(ctx); err != nil {
		return fmt.Errorf("take over: %w", err)
	}
	running.Go(func() { b.staff.run(ctx) })
	if b.cfg.Idle > 0 {
		running.Go(func() {
			b.awaitIdle(ctx)
			endServe()
		})
	}
	select {
	case <-ctx.Done():
		b.ending.Store(true)
		b.super.StopClients() // while the models still answer the gateway's requests
	case <-b.handedTo:
	case err := <-failed:
		return err
	}
	return b.drainLoops(drained, failed)
}

// unservedPoll is how often a drain looks for models without workers.
const unservedPoll = 100 * time.Millisecond

func (b *Broker) drainLoops(drained <-chan struct{}, failed <-chan error) error {
	b.log.Info("draining")
	b.models.refuseNew()
	for _, l := range b.loops {
		l.Drain()
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
			if handed { // new workers find the other broker
				grace, mayServe = 0, func(string) bool { return false }
			}
			for _, l := range b.loops {
				l.Post(func() {
					l.EndUnserved(grace, mayServe)
					if handed {
						l.SendIdleClientsOn()
					}
				})
			}
		case <-over:
			if len(drained) == left { // all have drained just now
				continue
			}
			b.log.Warn("drain time is over, requests are left unfinished")
			return nil
		}
	}
	b.log.Info("drained")
	return nil
}

// KillWorkers ends the worker processes in a few seconds, for a caller that does not wait
// for Serve. It returns true if no process is left, nor our own MPS.
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

// killTime is longer than a supervisor in a hurry waits for its workers.
const killTime = 4 * time.Second

func (b *Broker) declaredWorkers() []supervise.Group {
	groups := []supervise.Group{{Workers: b.cfg.Workers}}
	for i := range b.cfg.Models {
		groups = append(groups, b.cfg.Models[i].workerGroups()...)
	}
	return groups
}

// release closes the socket, the connections and the rings. The loops have ended.
func (b *Broker) release() {
	if b.listener != nil {
		b.listener.close()
	}
	b.closeAll()
	b.serving.Wait() // before the rings: a peer that attaches touches one
	b.weights.close()
	b.refusals.close()
	for _, l := range b.loops {
		l.ReleaseRings()
	}
	for _, l := range b.loops {
		l.Close()
	}
}
