// SPDX-License-Identifier: Apache-2.0

// Package supervise starts, watches and ends worker processes. It logs their output, starts
// them again when they end, and ends them, with all their children, when it is stopped. The
// processes can share GPUs through MPS (mps.go).
//
// The supervisor does not know the broker. The broker reports that a worker attached
// (Attached), looks for batches (Ready), left (Left), or fails batches that others run
// (Replace).
package supervise

import (
	"cmp"
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

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/status"
)

// Worker declares worker processes: [[model.worker]] in the configuration file.
type Worker struct {
	Name      string // for logs and statistics; default: the model's
	Command   []string
	Instances int // processes; default 1
	// Least and Most bound Instances, if Most is not 0: then Resize changes it with the load.
	Least, Most int
	Memory      int64             // bytes of its GPU that each process needs; 0: unknown
	Spares      int               // further processes that are kept warm, to take the place of a lost one
	GPUs        []int             // instance i gets GPUs[i modulo their number]; none: all are visible
	Env         map[string]string // on top of the broker's environment
	// ThreadPercentage is each process's share of a GPU's multiprocessors under MPS; 0: all.
	ThreadPercentage int
	StopTime         time.Duration // between SIGTERM and SIGKILL; default 10 s
	Client           bool          // it is no worker but uses the models, like a gateway
}

// Limits and defaults of supervision.
const (
	maxInstances = 256

	DefaultStopTime = 10 * time.Second

	// A process that ends is started again after firstBackoff. The back-off doubles up to
	// lastBackoff, and is reset after a life of steadyTime.
	firstBackoff = 100 * time.Millisecond
	lastBackoff  = 10 * time.Second
	steadyTime   = 10 * time.Second

	// MayServe ignores a process after this many lives in a row that did not attach.
	hopelessStarts = 5
)

// Fill sets defaults, and refuses a bad declaration.
func (w *Worker) Fill() error {
	if w.Most > 0 {
		w.Instances = min(max(w.Instances, w.Least, 1), w.Most)
	}
	w.Instances = cmp.Or(w.Instances, 1)
	w.StopTime = cmp.Or(w.StopTime, DefaultStopTime)
	switch {
	case len(w.Command) == 0 || w.Command[0] == "":
		return fmt.Errorf("%w: worker without a command", status.ErrInvalid)
	case w.Spares < 0 || w.Spares > maxInstances:
		return fmt.Errorf("%w: %d spares of a worker, must be 0..%d", status.ErrInvalid, w.Spares, maxInstances)
	case w.Instances < 1 || w.Instances > maxInstances:
		return fmt.Errorf("%w: %d instances of a worker, must be 1..%d", status.ErrInvalid, w.Instances, maxInstances)
	case w.Most < 0 || w.Most > maxInstances || w.Least < 0 || w.Least > w.Most:
		return fmt.Errorf("%w: instances of a worker from %d to %d, must be 0..%d, in this order", status.ErrInvalid, w.Least, w.Most, maxInstances)
	case w.Memory < 0 || w.Memory > 0 && len(w.GPUs) == 0:
		return fmt.Errorf("%w: memory of a worker is that of its GPU: name the GPU, as in gpus = [0]", status.ErrInvalid)
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

// Group is the workers of one model, or workers that declare their models themselves.
type Group struct {
	Model   string
	Workers []Worker
}

// Supervisor runs declared worker processes. Any goroutine may call its methods.
type Supervisor struct {
	log    *slog.Logger
	socket string

	mu             sync.Mutex
	changing       map[string]*sync.Mutex // one change of a model's pools at a time; see changeModel
	reach          string                 // the broker's address for new processes: socket, or for a while another name
	mps            *mps                   // nil unless it is wanted
	pools          []*pool
	procs          []*process       // of all pools, also while they are being replaced
	asleep         map[string]bool  // models without processes until Wake
	attached       map[int]attached // the broker's workers, by pid
	starting       int              // processes without a known pid
	started        *sync.Cond       // a start has ended
	stopped        bool
	clientsStopped bool // see StopClients
	running        sync.WaitGroup
	mpsEnds        sync.Once

	// Faulted, set before Start, is called when the GPU memory of all workers is lost.
	Faulted func()
	healing sync.Mutex // held while healMPS runs
	healed  time.Time  // when MPS was started again; healing guards it

	hurried sync.Once
	hurry   chan struct{} // closed when StopTime no longer counts; see Hurry
}

type attached struct {
	kin      []int // pids, one of which may be a supervised process; see kinOf
	sessions int   // one process may serve several models
}

// New makes a supervisor whose workers find their broker at socket.
func New(log *slog.Logger, socket string) *Supervisor {
	s := &Supervisor{log: log, socket: socket, reach: socket, attached: map[int]attached{}, changing: map[string]*sync.Mutex{}, asleep: map[string]bool{}, hurry: make(chan struct{})}
	s.started = sync.NewCond(&s.mu)
	return s
}

// locked calls f with the mutex held.
func (s *Supervisor) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// Start starts MPS if it is wanted, then the workers, and does not wait for them.
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

// WarmUp starts the workers, with the broker at reach until StartClients, and awaits them.
func (s *Supervisor) WarmUp(ctx context.Context, reach string, mps bool, groups ...Group) error {
	s.locked(func() { s.reach = reach })
	s.startMPS(mps)
	for _, g := range groups {
		s.addGroup(g, false)
	}
	s.mu.Lock()
	if s.mps != nil && s.mps.from { // if this broker gives up, the old one's workers need MPS
		s.mps.own = false
	}
	procs := slices.Clone(s.procs)
	s.mu.Unlock()
	for _, p := range procs {
		if err := p.awaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

// StartClients starts the processes that use models after WarmUp. The old and the new
// broker's would want the same ports.
func (s *Supervisor) StartClients(groups ...Group) {
	s.mu.Lock()
	s.reach = s.socket
	if s.mps != nil && s.mps.from {
		s.mps.own = true
	}
	s.mu.Unlock()
	for _, g := range groups {
		s.addGroup(g, true)
	}
}

func (s *Supervisor) startMPS(wanted bool) {
	if wanted {
		m := startMPS(s.log, s.socket)
		s.locked(func() { s.mps = m })
	}
}

// LeaveMPS lets the daemon outlive this supervisor, for another broker.
func (s *Supervisor) LeaveMPS() {
	s.locked(func() {
		if s.mps != nil {
			s.mps.own = false
		}
	})
}

// Add starts another group.
func (s *Supervisor) Add(g Group) {
	s.addGroup(g, false)
	s.addGroup(g, true)
}

func (s *Supervisor) addGroup(g Group, clients bool) {
	defer s.changeModel(g.Model)()
	for i := range g.Workers {
		if g.Workers[i].Client == clients {
			s.startPool(g.Model, i, &g.Workers[i])
		}
	}
}

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
	if n := p.cfg.ThreadPercentage; n > 0 && mps.isActive() {
		env = append(env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="+strconv.Itoa(n))
	}
	for k, v := range p.cfg.Env {
		env = append(env, k+"="+v)
	}
	return env
}

// StopClients ends the processes that use models, and waits for them: their requests need
// the workers. No client is started after that.
func (s *Supervisor) StopClients() {
	s.mu.Lock()
	s.clientsStopped = true
	var ending []*process
	for _, p := range s.procs {
		if p.cfg.Client {
			p.endForGood()
			ending = append(ending, p)
		}
	}
	s.mu.Unlock()
	for _, p := range ending {
		<-p.over
	}
}

// Stop sends SIGTERM to all workers, and starts none again.
func (s *Supervisor) Stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopped {
		s.stopped = true
		for _, p := range s.procs {
			p.endForGood()
		}
	}
}

// Hurry sends a second SIGTERM after againTime, and SIGKILL after hurryTime. Python's
// serve takes two quick signals for one press of Ctrl-C, so againTime is longer.
const (
	againTime = 700 * time.Millisecond
	hurryTime = 2 * time.Second
)

// Hurry is Stop with hurryTime as every process's StopTime. Python's serve ends its own
// processes at the second SIGTERM.
func (s *Supervisor) Hurry() {
	s.Stop()
	s.hurried.Do(func() {
		time.AfterFunc(againTime, s.terminateAgain)
		time.AfterFunc(hurryTime, func() { close(s.hurry) })
	})
}

func (s *Supervisor) terminateAgain() {
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
	s.mpsEnds.Do(m.stop)
}

// Snapshot is the state of all processes, and of MPS.
func (s *Supervisor) Snapshot() (list []stats.Process, mps string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list = []stats.Process{} // null in JSON otherwise
	for _, p := range s.procs {
		list = append(list, p.snapshot())
	}
	return list, s.mps.String()
}

// AwaitStart waits until a worker's process is known, before the worker attaches. A spare
// that attaches earlier would be taken for a worker. No loop calls it. A start that hangs
// delays only workers that the supervisor started. kin is for Attached: it is read from /proc.
func (s *Supervisor) AwaitStart(pid int) (kin []int) {
	kin, ours := kinOf(pid)
	s.mu.Lock()
	defer s.mu.Unlock()
	for ours && s.starting > 0 && s.findKin(kin) == nil {
		s.started.Wait()
	}
	return kin
}

// GroupOf names the workers that a process may replace: those of its model's declarations,
// or of its own declaration. It is "" if the supervisor did not start the process.
func (s *Supervisor) GroupOf(pid int) string {
	kin, _ := kinOf(pid)
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.findKin(kin)
	if p == nil {
		return ""
	}
	return p.group()
}

func (p *process) group() string { return cmp.Or(p.model, "worker "+strconv.Itoa(p.pool.n)) }

// WillReturn says whether a process of a group has no worker now, and is kept alive to have one again.
func (s *Supervisor) WillReturn(group string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.procs, func(p *process) bool { return p.group() == group && p.sessions == 0 && !p.stopping && !p.cfg.Client })
}

// Starting describes the processes that may become workers of a model and have not attached.
func (s *Supervisor) Starting(model string) (list []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.procs {
		if !p.mayServe(model) || p.pid == 0 {
			continue
		}
		text := fmt.Sprintf("%s (pid %d) for %.0f s", p.name, p.pid, time.Since(p.since).Seconds())
		if p.failedStarts > 0 {
			text += fmt.Sprintf(", after %d failed starts, the last: %s", p.failedStarts, p.lastEnd)
		}
		list = append(list, text)
	}
	return list
}

// Attached reports that a process attached to the broker as a worker. The process may be
// supervised, a child of such a process, or unknown.
func (s *Supervisor) Attached(pid int, kin []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attached[pid] = attached{kin, s.attached[pid].sessions + 1}
	if p := s.findProcess(pid); p != nil {
		p.countAttached()
	}
}

// Ready reports that a worker looks for batches. Only then may an old worker be ended for
// it: on a busy machine the first look may come seconds after the worker attached.
func (s *Supervisor) Ready(pid int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.findProcess(pid); p != nil {
		p.markReady()
	}
}

// AwaitsReady says whether a change may wait for Ready of this pid.
func (s *Supervisor) AwaitsReady(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.findProcess(pid)
	return p != nil && !p.proven
}

// MayServe says whether a process can still become a worker of the model.
func (s *Supervisor) MayServe(model string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.procs, func(p *process) bool { return p.mayServe(model) })
}

// mayServe is called with the supervisor's mutex held.
func (p *process) mayServe(model string) bool {
	mayStart := !p.cfg.Client && p.failedStarts < hopelessStarts && p.state != "stopped"
	return mayStart && p.sessions == 0 && (p.model == model || p.model == "")
}

// Left reports that an attached worker is gone, and whether it had begun a batch. Such a
// batch may have killed the worker, so its process is started again without a back-off.
// replace says that a spare may take its place.
func (s *Supervisor) Left(pid int, withBatch bool) (replace bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.findProcess(pid); p != nil {
		p.sessions, p.lost = max(0, p.sessions-1), pid
		replace = !p.spare && !p.stopping
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

// Replace ends the process of an attached worker, by SIGKILL if need be. Then the process
// is started again. It returns false if the supervisor did not start the process.
func (s *Supervisor) Replace(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.findProcess(pid)
	if p == nil {
		return false
	}
	life := p.pid
	p.terminate()
	time.AfterFunc(p.cfg.StopTime, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if p.pid == life && life != 0 {
			s.log.Warn("worker process does not end, killing it", "worker", p.name, "pid", life)
			p.killed = life
			_ = syscall.Kill(-life, syscall.SIGKILL)
		}
	})
	return true
}

// Killed reports that the broker kills an attached worker.
func (s *Supervisor) Killed(pid int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.findProcess(pid); p != nil {
		p.killed = p.life
	}
}

// Restarts is how often the process of an attached worker was started again.
func (s *Supervisor) Restarts(pid int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.findProcess(pid); p != nil {
		return p.restarts
	}
	return 0
}

// findProcess is the process of an attached worker, or nil. The mutex is held.
func (s *Supervisor) findProcess(pid int) *process {
	return s.findKin(s.attached[pid].kin)
}

// findKin is the process whose present or last life has one of these pids, or nil. 0 is no
// pid. The mutex is held.
func (s *Supervisor) findKin(kin []int) *process {
	for _, p := range s.procs {
		if p.life != 0 && slices.Contains(kin, p.life) {
			return p
		}
	}
	return nil
}
