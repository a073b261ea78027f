package broker

import (
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/status"
)

// WorkerConfig declares worker processes that the broker starts, watches and
// restarts: [[model.worker]] in the configuration file.
type WorkerConfig struct {
	Command   []string
	Instances int               // processes; default 1
	GPUs      []int             // instance i gets GPUs[i modulo their number]; none: all are visible
	Env       map[string]string // on top of the broker's own environment
	// ThreadPercentage is the share of a GPU's multiprocessors that each
	// process may use under MPS; 0 for all.
	ThreadPercentage int
	StopTime         time.Duration // between SIGTERM and SIGKILL; default 10 s
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
)

func (w *WorkerConfig) fill() error {
	if w.Instances == 0 {
		w.Instances = 1
	}
	if w.StopTime == 0 {
		w.StopTime = DefaultStopTime
	}
	switch {
	case len(w.Command) == 0 || w.Command[0] == "":
		return fmt.Errorf("%w: worker without a command", status.ErrInvalid)
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

// supervisor runs the declared worker processes. It is no part of the loop:
// a worker that it starts attaches like any other.
type supervisor struct {
	log    *slog.Logger
	socket string
	mps    *mps // nil unless asked for

	mu      sync.Mutex
	procs   []*process
	stopped bool
	running sync.WaitGroup
}

func newSupervisor(cfg *Config) *supervisor {
	return &supervisor{log: cfg.Logger, socket: cfg.Socket}
}

// start brings MPS up if it is wanted, then the workers of all models. It
// does not wait for any of them: the broker serves meanwhile.
func (s *supervisor) start(cfg *Config) {
	s.running.Add(1)
	go func() {
		defer s.running.Done()
		if cfg.MPS {
			m := startMPS(s.log, cfg.Socket)
			s.mu.Lock()
			s.mps = m
			s.mu.Unlock()
		}
		for _, m := range cfg.Models {
			s.startModel(&m)
		}
		for i := range cfg.Workers {
			s.startWorkers("", i, &cfg.Workers[i])
		}
	}()
}

// startModel starts the workers that a model declares.
func (s *supervisor) startModel(m *ModelConfig) {
	for i := range m.Workers {
		s.startWorkers(m.Name, i, &m.Workers[i])
	}
}

// startWorkers starts the instances of the n-th declaration of a model.
func (s *supervisor) startWorkers(model string, n int, w *WorkerConfig) {
	label := model
	if label == "" {
		label = "worker"
	}
	if n > 0 {
		label += "." + strconv.Itoa(n)
	}
	for i := range w.Instances {
		p := &process{s: s, name: fmt.Sprintf("%s-%d", label, i), model: model, cfg: w, gpu: -1, stop: make(chan struct{})}
		if len(w.GPUs) > 0 {
			p.gpu = w.GPUs[i%len(w.GPUs)]
		}
		s.mu.Lock()
		if s.stopped {
			s.mu.Unlock()
			return
		}
		s.procs = append(s.procs, p)
		s.running.Add(1)
		s.mu.Unlock()
		go func() {
			defer s.running.Done()
			p.run()
		}()
	}
}

// environment is what a worker process gets to know.
func (s *supervisor) environment(p *process) []string {
	env := append(os.Environ(), "RINGBATCH_SOCKET="+s.socket, "RINGBATCH_WORKER_NAME="+p.name)
	if p.model != "" {
		env = append(env, "RINGBATCH_MODEL="+p.model)
	}
	if p.gpu >= 0 {
		env = append(env, "CUDA_VISIBLE_DEVICES="+strconv.Itoa(p.gpu))
	}
	s.mu.Lock()
	mps := s.mps
	s.mu.Unlock()
	env = append(env, mps.environment()...)
	if n := p.cfg.ThreadPercentage; n > 0 && mps.active() {
		env = append(env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="+strconv.Itoa(n))
	}
	for k, v := range p.cfg.Env {
		env = append(env, k+"="+v)
	}
	return env
}

// stop tells all workers to end.
func (s *supervisor) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopped {
		s.stopped = true
		for _, p := range s.procs {
			close(p.stop)
		}
	}
}

// wait returns when the last worker has ended, and MPS after it.
func (s *supervisor) wait() {
	s.running.Wait()
	s.mps.stop()
}

func (s *supervisor) snapshot() (list []stats.Process, mps string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	list = []stats.Process{} // in JSON a list, also when it is empty
	for _, p := range s.procs {
		list = append(list, p.snapshot())
	}
	return list, s.mps.String()
}

// restarts is how often the process with this pid was started again.
func (s *supervisor) restarts(pid int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.procs {
		if p.pid == pid {
			return p.restarts
		}
	}
	return 0
}
