package broker

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Broker serves models. Make one with New.
type Broker struct {
	cfg      Config
	log      *slog.Logger
	epoch    uint64
	loop     *loop
	listener *listener
	super    *supervise.Supervisor
	started  time.Time

	// Only the loop touches these.
	models   map[string]*model
	dirty    []*model
	now      int64 // shm.Now at the start of this round
	due      int64 // when the next round is needed even if nothing happens
	draining bool
	stopped  chan struct{} // closed when the loop has ended

	// The world outside, replaced by the simulation.
	clock    func() int64      // shm.Now
	killPeer func(*peer) error // (*peer).kill

	conns     conns
	offenders offenders
	changes   changes
}

// New checks the configuration, takes the socket and makes the declared
// models. Serve must follow.
func New(cfg Config) (*Broker, error) {
	cfg.fill()
	if cfg.MaxClients < 0 {
		return nil, fmt.Errorf("%w: max_clients is %d, must be positive", status.ErrInvalid, cfg.MaxClients)
	}
	for i := range cfg.Workers {
		if err := cfg.Workers[i].Fill(); err != nil {
			return nil, err
		}
	}
	b := &Broker{
		cfg: cfg, log: cfg.Logger, epoch: uint64(time.Now().UnixNano()), started: time.Now(),
		models: map[string]*model{}, now: shm.Now(), stopped: make(chan struct{}), clock: shm.Now, killPeer: (*peer).kill,
	}
	b.changes.count = b.epoch
	var err error
	if b.loop, err = newLoop(); err != nil {
		return nil, err
	}
	for _, mc := range cfg.Models {
		if b.models[mc.Name] != nil {
			err = fmt.Errorf("%w: model %q is declared twice", status.ErrInvalid, mc.Name)
		} else {
			var m *model
			if m, err = b.newModel(mc); err == nil {
				b.models[mc.Name] = m
			}
		}
		if err != nil {
			b.release()
			return nil, err
		}
	}
	if b.listener, err = listen(cfg.Socket, cfg.OpenFolder); err != nil {
		b.release()
		return nil, err
	}
	b.super = supervise.New(b.log, cfg.Socket)
	b.log.Info("broker listening", "socket", cfg.Socket, "pid", os.Getpid(), "epoch", b.epoch)
	return b, nil
}

// Socket is where the broker listens.
func (b *Broker) Socket() string { return b.cfg.Socket }

// Serve runs until ctx ends, then drains: requests that were accepted finish,
// new ones get ErrDraining, for at most Config.DrainTime. It returns nil
// after a clean drain.
func (b *Broker) Serve(ctx context.Context) error {
	defer b.super.Wait()
	defer b.release()
	defer b.super.Stop() // before release: workers are told to end, not left to look for a broker
	go b.accept()
	b.super.Start(b.cfg.MPS, b.declaredWorkers()...)
	stop := context.AfterFunc(ctx, func() { b.loop.post(b.drain) })
	defer stop()
	drainUntil := never
	for {
		if err := b.loop.sleep(min(b.due, drainUntil), b.lookOut(), func() { b.now = b.clock() }); err != nil {
			return err
		}
		b.settle()
		if b.draining {
			if drainUntil == never {
				drainUntil = b.now + int64(b.cfg.DrainTime)
			}
			if b.idle() {
				b.log.Info("drained")
				return nil
			}
			if b.now >= drainUntil {
				b.log.Warn("drain time is over, requests are left unfinished")
				return nil
			}
		}
	}
}

// declaredWorkers are the processes to start, each model's and those that
// belong to none.
func (b *Broker) declaredWorkers() []supervise.Group {
	groups := []supervise.Group{{Workers: b.cfg.Workers}}
	for _, m := range b.cfg.Models {
		groups = append(groups, supervise.Group{Model: m.Name, Workers: m.Workers})
	}
	return groups
}

// lookOut is until when it pays to look out for commits: a free worker waits
// for a batch, and the batch for company, which often follows at once, from
// those whose answers came together.
func (b *Broker) lookOut() int64 {
	t := int64(0)
	for _, m := range b.models {
		if m.batcher.Queued() > 0 && m.batcher.IdleWorkers() > 0 {
			t = max(t, m.arrived+int64(shm.LeastSpin))
		}
	}
	return t
}

// settle ends a round of the loop: whatever the round's events and the time
// have made possible is done.
func (b *Broker) settle() {
	b.loop.runPosts()
	if b.now >= b.due {
		b.timers()
	}
	for len(b.dirty) > 0 {
		m := b.dirty[len(b.dirty)-1]
		b.dirty = b.dirty[:len(b.dirty)-1]
		m.decide()
	}
	b.due = b.nextTimer()
}

func (b *Broker) drain() {
	if !b.draining {
		b.draining = true
		b.log.Info("draining")
		for _, m := range b.models {
			_ = m.apply(m.cfg.Policy) // it was in force before, so it fits
			m.touch()
		}
	}
}

func (b *Broker) idle() bool {
	for _, m := range b.models {
		if !m.idleNow() {
			return false
		}
	}
	return true
}

func (b *Broker) nextTimer() int64 {
	t := never
	for _, m := range b.models {
		t = min(t, m.nextTimer())
	}
	return t
}

// timers wakes the models whose time has come.
func (b *Broker) timers() {
	for _, m := range b.models {
		if m.nextTimer() <= b.now {
			m.checkLeases()
			m.touch()
		}
	}
}

// maybeForget drops a model that a worker declared once nobody uses it.
func (b *Broker) maybeForget(m *model) {
	if !m.dynamic || len(m.clients) > 0 || m.windows.free() < m.layout.Slots {
		return
	}
	for _, w := range m.workers {
		if w != nil {
			return
		}
	}
	if b.models[m.cfg.Name] == m {
		delete(b.models, m.cfg.Name)
		b.changes.note()
		b.dirty = slices.DeleteFunc(b.dirty, func(d *model) bool { return d == m })
		m.dirty = true // so that nothing marks it again
		m.close()
		m.log.Info("model forgotten: its last worker and client left")
	}
}

// do runs f on the loop and waits for it; false if the broker has stopped.
func (b *Broker) do(f func()) bool {
	done := make(chan struct{})
	b.loop.post(func() { f(); close(done) })
	select {
	case <-done:
		return true
	case <-b.stopped:
	}
	select {
	case <-done: // in its last round
		return true
	default:
		return false
	}
}

// release gives everything back: nothing of a broker outlives it.
func (b *Broker) release() {
	close(b.stopped)
	if b.listener != nil {
		b.listener.close()
	}
	for _, m := range b.models {
		for c := range m.clients {
			c.close(b)
		}
		for _, w := range m.workers {
			if w != nil {
				w.close(b)
			}
		}
		m.close()
	}
	b.conns.close()
	b.loop.close()
}
