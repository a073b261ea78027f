// SPDX-License-Identifier: Apache-2.0

// Package supervise runs worker processes: it starts those that a
// configuration declares, logs what they print, starts them again when they
// end, and ends them, with all that they started, when it is stopped. It can
// have them share GPUs through MPS (mps.go).
//
// It does not know the broker. The broker tells it what only the broker can
// see: that a process attached (Attached), looks for batches (Ready), or left
// with one (Left).
package supervise

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/status"
)

// Worker declares worker processes to start, watch and start again:
// [[model.worker]] in the configuration file.
type Worker struct {
	Name      string // for logs and statistics; default: the model's
	Command   []string
	Instances int               // processes; default 1
	Spares    int               // further ones that are kept warm, to take the place of one that is lost
	GPUs      []int             // instance i gets GPUs[i modulo their number]; none: all are visible
	Env       map[string]string // on top of our own environment
	// ThreadPercentage is the share of a GPU's multiprocessors that each
	// process may use under MPS; 0 for all.
	ThreadPercentage int
	StopTime         time.Duration // between SIGTERM and SIGKILL; default 10 s
	// Client says that the process is no worker but uses the models, like a
	// gateway: nobody counts on it to serve one.
	Client bool
}

// Limits and defaults of supervision.
const (
	maxInstances = 256

	DefaultStopTime = 10 * time.Second

	// A process that ends is started again after firstBackoff; the wait
	// doubles up to lastBackoff, and starts anew once it ran for steadyTime.
	firstBackoff = 100 * time.Millisecond
	lastBackoff  = 10 * time.Second
	steadyTime   = 10 * time.Second

	// After so many lives in a row that ended before they attached, nobody
	// counts on a process any more.
	hopelessStarts = 5
)

// Fill puts defaults where the declaration left something open, and refuses
// what cannot be.
func (w *Worker) Fill() error {
	if w.Instances == 0 {
		w.Instances = 1
	}
	if w.StopTime == 0 {
		w.StopTime = DefaultStopTime
	}
	switch {
	case len(w.Command) == 0 || w.Command[0] == "":
		return fmt.Errorf("%w: worker without a command", status.ErrInvalid)
	case w.Spares < 0 || w.Spares > maxInstances:
		return fmt.Errorf("%w: %d spares of a worker, must be 0..%d", status.ErrInvalid, w.Spares, maxInstances)
	case w.Instances < 1 || w.Instances > maxInstances:
		return fmt.Errorf("%w: %d instances of a worker, must be 1..%d", status.ErrInvalid, w.Instances, maxInstances)
	case w.ThreadPercentage < 0 || w.ThreadPercentage > 100:
		return fmt.Errorf("%w: thread_percentage is %d, must be 1..100", status.ErrInvalid, w.ThreadPercentage)
	case w.StopTime < 0:
		return fmt.Errorf("%w: stop_time is %v, must be positive", status.ErrInvalid, w.StopTime)
	}
	for _, g := range w.GPUs {
		if g < 0 {
			return fmt.Errorf("%w: GPU number %d", status.ErrInvalid, g)
		}
	}
	for k, v := range w.Env { // the kernel would see another name, or refuse every start
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return fmt.Errorf("%w: env %q=%q of a worker", status.ErrInvalid, k, v)
		}
	}
	return nil
}

// Group is the workers that belong to one model, or to none if they say
// themselves what they serve.
type Group struct {
	Model   string
	Workers []Worker
}

// Supervisor runs declared worker processes. Its methods may be called from
// any goroutine.
type Supervisor struct {
	log    *slog.Logger
	socket string

	changing sync.Mutex // one change of the pools at a time

	mu             sync.Mutex
	reach          string // where the next process finds the broker: socket, or for a while another name of it
	mps            *mps   // nil unless asked for
	pools          []*pool
	procs          []*process       // of all pools, and those that are being replaced
	attached       map[int]attached // by pid: the workers that the broker has
	starting       int              // processes whose pid is not known yet
	started        *sync.Cond       // one of them is known, or did not start
	stopped        bool
	clientsStopped bool // see StopClients
	running        sync.WaitGroup
	mpsEnds        sync.Once

	// Faulted, if there is one, is called when the GPU memory of all workers is lost.
	// Set it before Start.
	Faulted func()
	healing sync.Mutex // held while MPS is looked after
	healed  time.Time  // when it was started again; healing guards it

	hurried sync.Once
	hurry   chan struct{} // closed when nobody waits any longer, see Hurry
}

type attached struct {
	kin      []int // one of which may be ours, see kinOf
	sessions int   // one process may serve several models
}

// New makes a supervisor whose workers find their broker at socket.
func New(log *slog.Logger, socket string) *Supervisor {
	s := &Supervisor{log: log, socket: socket, reach: socket, attached: map[int]attached{}, hurry: make(chan struct{})}
	s.started = sync.NewCond(&s.mu)
	return s
}

// Start brings MPS up if it is wanted, then the workers. It does not wait for
// any of them.
func (s *Supervisor) Start(mps bool, groups ...Group) {
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		s.startMPS(mps)
		for _, g := range groups {
			s.Add(g)
		}
	}()
}

// WarmUp is Start that returns when every worker is ready, or with why one
// will not be. They find the broker at reach until StartClients is called, which
// starts the rest.
func (s *Supervisor) WarmUp(ctx context.Context, reach string, mps bool, groups ...Group) error {
	s.mu.Lock()
	s.reach = reach
	s.mu.Unlock()
	s.startMPS(mps)
	for _, g := range groups {
		s.add(g, false)
	}
	s.mu.Lock()
	if s.mps != nil && s.mps.from { // if this one gives up, the old broker's workers need it
		s.mps.own = false
	}
	procs := slices.Clone(s.procs)
	s.mu.Unlock()
	for _, p := range procs {
		if err := p.await(ctx); err != nil {
			return err
		}
	}
	return nil
}

// StartClients starts what WarmUp has left out: the processes that use models,
// of which two would want the same ports.
func (s *Supervisor) StartClients(groups ...Group) {
	s.mu.Lock()
	s.reach = s.socket
	if s.mps != nil && s.mps.from {
		s.mps.own = true
	}
	s.mu.Unlock()
	for _, g := range groups {
		s.add(g, true)
	}
}

func (s *Supervisor) startMPS(wanted bool) {
	if wanted {
		m := startMPS(s.log, s.socket)
		s.mu.Lock()
		s.mps = m
		s.mu.Unlock()
	}
}

// LeaveMPS has its daemon outlive this supervisor: another one uses it.
func (s *Supervisor) LeaveMPS() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mps != nil {
		s.mps.own = false
	}
}

// Add starts workers beside those that run.
func (s *Supervisor) Add(g Group) {
	s.add(g, false)
	s.add(g, true)
}

// add starts a group's workers, or the clients among them.
func (s *Supervisor) add(g Group, clients bool) {
	for i := range g.Workers {
		if g.Workers[i].Client == clients {
			s.startPool(g.Model, i, &g.Workers[i])
		}
	}
}

// environment is what a worker process gets to know.
func (s *Supervisor) environment(p *process) []string {
	s.mu.Lock()
	mps, reach := s.mps, s.reach
	s.mu.Unlock()
	env := append(os.Environ(), "RINGBATCH_SOCKET="+reach, "RINGBATCH_SUPERVISED="+reach, "RINGBATCH_WORKER_NAME="+p.name)
	if p.model != "" {
		env = append(env, "RINGBATCH_MODEL="+p.model)
	}
	if p.gpu >= 0 {
		env = append(env, "CUDA_VISIBLE_DEVICES="+strconv.Itoa(p.gpu))
	}
	env = append(env, mps.environment()...)
	if n := p.cfg.ThreadPercentage; n > 0 && mps.active() {
		env = append(env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="+strconv.Itoa(n))
	}
	for k, v := range p.cfg.Env {
		env = append(env, k+"="+v)
	}
	return env
}

// StopClients tells the processes that use models to end, and returns when they
// have: what they have accepted needs the workers. None is started after that.
func (s *Supervisor) StopClients() {
	s.mu.Lock()
	s.clientsStopped = true
	var ending []*process
	for _, p := range s.procs {
		if p.cfg.Client {
			p.tell()
			ending = append(ending, p)
		}
	}
	s.mu.Unlock()
	for _, p := range ending {
		<-p.over
	}
}

// Stop tells all workers to end.
func (s *Supervisor) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopped {
		s.stopped = true
		for _, p := range s.procs {
			p.tell()
		}
	}
}

// Of Hurry: when those that still run are told once more, which is later than serve takes
// two signals for one press of Ctrl-C, and when they are killed.
const (
	againTime = 700 * time.Millisecond
	hurryTime = 2 * time.Second
)

// Hurry is Stop for one who does not wait for long: what is left after two seconds
// is killed, whatever its StopTime. A worker may have started others, out of our
// reach: by a second SIGTERM serve ends its own.
func (s *Supervisor) Hurry() {
	s.Stop()
	s.hurried.Do(func() {
		time.AfterFunc(againTime, s.tellAgain)
		time.AfterFunc(hurryTime, func() { close(s.hurry) })
	})
}

func (s *Supervisor) tellAgain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.procs {
		if p.pid != 0 {
			_ = syscall.Kill(-p.pid, syscall.SIGTERM)
		}
	}
}

// Wait returns when the last worker has ended, and MPS after it.
func (s *Supervisor) Wait() {
	s.running.Wait()
	s.mu.Lock()
	m := s.mps
	s.mu.Unlock()
	if m != nil {
		s.mpsEnds.Do(m.stop)
	}
}

// Snapshot is the state of all processes, and of MPS.
func (s *Supervisor) Snapshot() (list []stats.Process, mps string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list = []stats.Process{} // in JSON a list, also when it is empty
	for _, p := range s.procs {
		list = append(list, p.snapshot())
	}
	return list, s.mps.String()
}

// AwaitStart returns when it is known whose process a worker is that is about to attach.
// A spare that is quicker than our own book-keeping would be taken for a worker. It may
// wait, so no loop calls it; a start of others that hangs does not keep a worker.
func (s *Supervisor) AwaitStart(pid int) {
	kin, ours := kinOf(pid)
	s.mu.Lock()
	defer s.mu.Unlock()
	for ours && s.starting > 0 && s.among(kin) == nil {
		s.started.Wait()
	}
}

// Attached says that the process with this pid attached to the broker as a
// worker. It may be one of ours, started by one of ours, or none.
func (s *Supervisor) Attached(pid int) {
	kin, _ := kinOf(pid)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attached[pid] = attached{kin, s.attached[pid].sessions + 1}
	if p := s.find(pid); p != nil {
		p.countAttached()
	}
}

// Ready says that the worker with this pid looks for batches. Until then nobody
// is ended for it: between attaching and its first look it has things to do, and
// on a busy machine seconds to wait for a core.
func (s *Supervisor) Ready(pid int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.find(pid); p != nil {
		p.markReady()
	}
}

// AwaitsReady tells whether somebody may wait for Ready of this pid.
func (s *Supervisor) AwaitsReady(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.find(pid)
	return p != nil && !p.proven
}

// MayServe says whether one of the processes can still become a worker of the
// model: it was declared for it, or for none in particular and has not attached
// yet. Those that keep failing to start do not count.
func (s *Supervisor) MayServe(model string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.procs {
		if !p.cfg.Client && p.sessions == 0 && p.failedStarts < hopelessStarts && p.state != "stopped" && (p.model == model || p.model == "") {
			return true
		}
	}
	return false
}

// Left says that an attached worker is gone, and whether it had begun a batch.
// Then the batch may be what killed it, which is no reason to let the next
// request wait for a back-off: it is started again at once. replace says that a
// spare may take its place.
func (s *Supervisor) Left(pid int, withBatch bool) (replace bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.find(pid); p != nil {
		p.sessions, p.lost = max(0, p.sessions-1), pid
		replace = !p.spare && !p.told
		if withBatch {
			select {
			case p.lostBatch <- struct{}{}:
			default:
			}
		}
	}
	if a := s.attached[pid]; a.sessions > 1 {
		a.sessions--
		s.attached[pid] = a
	} else {
		delete(s.attached, pid)
	}
	return replace
}

// Restarts is how often the process of an attached worker was started again.
func (s *Supervisor) Restarts(pid int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.find(pid); p != nil {
		return p.restarts
	}
	return 0
}

// find is the process of an attached worker, or nil. The mutex is held.
func (s *Supervisor) find(pid int) *process {
	return s.among(s.attached[pid].kin)
}

// among is the process that one of these pids is the life of, or nil. A process that has
// never run has no life, and a worker in a PID namespace that we do not see no pid: both
// are 0. The mutex is held.
func (s *Supervisor) among(kin []int) *process {
	for _, p := range s.procs {
		if p.life != 0 && slices.Contains(kin, p.life) {
			return p
		}
	}
	return nil
}
