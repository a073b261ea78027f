package broker

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/tensor"
)

// roleEnv makes the test binary, run again by the supervisor, a worker
// process of a certain kind.
const roleEnv = "RINGBATCH_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(roleEnv); role != "" {
		playRole(role)
	}
	os.Exit(m.Run())
}

func playRole(role string) {
	fmt.Println("role", role, "gpu", os.Getenv("CUDA_VISIBLE_DEVICES"), "pipe", os.Getenv("CUDA_MPS_PIPE_DIRECTORY"),
		"percentage", os.Getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), "name", os.Getenv("RINGBATCH_WORKER_NAME"))
	switch role {
	case "worker": // attaches, and ends on SIGTERM
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		s, err := attach.Open(ctx, control.SocketPath(""), shm.Memfd{}, &control.Request{
			Op: control.OpWorker, Model: os.Getenv("RINGBATCH_MODEL"), Name: os.Getenv("RINGBATCH_WORKER_NAME"),
			Worker: &control.WorkerInfo{Inputs: []string{"x:f32[4]"}, Outputs: []string{"y:f32[4]"}, Depth: 1},
		})
		if err != nil {
			fmt.Println(err)
			os.Exit(3)
		}
		<-ctx.Done()
		s.Close()
	case "stubborn": // does not end when asked to
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ignoring SIGTERM")
		select {}
	case "parent", "deserter": // has a child that does not end when asked to; the deserter leaves it
		child := exec.Command("/bin/sh", "-c", "trap '' TERM; echo ignoring; sleep 1000; :")
		child.Stdout = os.Stdout
		if err := child.Start(); err != nil {
			os.Exit(3)
		}
		fmt.Println("child", child.Process.Pid, "end")
		if role == "parent" {
			select {}
		}
		time.Sleep(500 * time.Millisecond) // for it to ignore SIGTERM
	case "broken":
		fmt.Println("cannot go on")
		os.Exit(7)
	}
	os.Exit(0)
}

// supervised is a broker with one model and the workers given.
type supervised struct {
	t      *testing.T
	b      *Broker
	log    *lockedBuffer
	stop   context.CancelFunc
	served chan error
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func supervise(t *testing.T, change func(*Config), workers ...WorkerConfig) *supervised {
	t.Helper()
	dir, err := os.MkdirTemp("", "rb")
	if err != nil {
		t.Fatal(err)
	}
	s := &supervised{t: t, log: &lockedBuffer{}, served: make(chan error, 1)}
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Socket: filepath.Join(dir, "s", "b.sock"), DrainTime: time.Second, Logger: slog.New(slog.NewTextHandler(s.log, nil)),
		Models: []ModelConfig{{Name: "m", Signature: sig, Slots: 64, Workers: workers}},
	}
	if change != nil {
		change(&cfg)
	}
	if s.b, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	go func() { s.served <- s.b.Serve(ctx) }()
	t.Cleanup(func() { s.end(); os.RemoveAll(dir) })
	return s
}

// end stops the broker and waits for it.
func (s *supervised) end() {
	s.stop()
	select {
	case err := <-s.served:
		s.served <- err
	case <-time.After(20 * time.Second):
		s.t.Fatal("the broker does not end")
	}
}

func (s *supervised) stats() stats.Broker { return s.b.Snapshot() }

// until waits for a condition.
func (s *supervised) until(what string, ok func(stats.Broker) bool) stats.Broker {
	s.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		st := s.stats()
		if ok(st) {
			return st
		}
		if time.Now().After(end) {
			s.t.Fatalf("%s: never happened; processes %+v\n%s", what, st.Processes, s.log)
		}
	}
}

func role(name string) WorkerConfig {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return WorkerConfig{Command: []string{self}, Env: map[string]string{roleEnv: name}}
}

func attached(n int) func(stats.Broker) bool {
	return func(st stats.Broker) bool { return len(st.Models) == 1 && len(st.Models[0].Workers) == n }
}

func TestDeclaredWorkersAreStartedWithTheirEnvironment(t *testing.T) {
	w := role("worker")
	w.Instances, w.GPUs, w.ThreadPercentage = 3, []int{4, 5}, 40
	s := supervise(t, nil, w)
	st := s.until("three workers attach", attached(3))
	for i, p := range st.Processes {
		if p.State != "running" || p.Pid == 0 || p.GPU == nil || *p.GPU != []int{4, 5, 4}[i] || p.Model != "m" {
			t.Errorf("process %d: %+v", i, p)
		}
	}
	for _, want := range []string{"gpu 4 pipe", "gpu 5 pipe", "name m-0", "name m-2"} {
		if !strings.Contains(s.log.String(), want) {
			t.Errorf("the log lacks %q:\n%s", want, s.log)
		}
	}
	if strings.Contains(s.log.String(), "percentage 40") {
		t.Error("a thread percentage was given without MPS")
	}
}

func TestAWorkerThatIsKilledIsStartedAgain(t *testing.T) {
	s := supervise(t, nil, role("worker"))
	first := s.until("the worker attaches", attached(1)).Processes[0].Pid
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	st := s.until("another one attaches", func(st stats.Broker) bool {
		return attached(1)(st) && st.Models[0].Workers[0].Pid != first
	})
	p, w := st.Processes[0], st.Models[0].Workers[0]
	if p.Restarts != 1 || w.Restarts != 1 || p.LastEnd != "killed by killed" || p.Pid != w.Pid {
		t.Errorf("process %+v, worker %+v", p, w)
	}
}

func TestAWorkerThatKeepsFailingIsStartedLessAndLessOften(t *testing.T) {
	s := supervise(t, nil, role("broken"))
	s.until("four lives", func(st stats.Broker) bool { return len(st.Processes) == 1 && st.Processes[0].Restarts >= 3 })
	log := s.log.String()
	for _, want := range []string{"cannot go on", "exit status 7", "in=100ms", "in=200ms", "in=400ms"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
}

func TestACommandThatDoesNotExistIsReported(t *testing.T) {
	s := supervise(t, nil, WorkerConfig{Command: []string{"/no/such/worker"}})
	st := s.until("a failed start", func(st stats.Broker) bool { return len(st.Processes) == 1 && st.Processes[0].LastEnd != "" })
	if p := st.Processes[0]; p.State == "running" || !strings.Contains(p.LastEnd, "no such file") {
		t.Errorf("%+v", p)
	}
}

func TestWorkersEndWithTheBroker(t *testing.T) {
	stubborn := role("stubborn")
	stubborn.StopTime = 300 * time.Millisecond
	s := supervise(t, nil, role("worker"), stubborn)
	st := s.until("both run", func(st stats.Broker) bool {
		return attached(1)(st) && strings.Contains(s.log.String(), "ignoring SIGTERM")
	})
	s.end()
	for _, p := range st.Processes {
		if err := syscall.Kill(p.Pid, 0); err != syscall.ESRCH {
			t.Errorf("process %s (%d) still there: %v", p.Name, p.Pid, err)
		}
	}
	if log := s.log.String(); strings.Count(log, "killing it") != 1 || strings.Contains(log, "starting it again") {
		t.Error(log)
	}
}

// A shell that is killed must not leave the worker it ran, nor a worker its
// children: each life would add to them.
func TestNothingThatAWorkerStartedOutlivesIt(t *testing.T) {
	for _, kind := range []string{"parent", "deserter"} {
		t.Run(kind, func(t *testing.T) {
			w := role(kind)
			w.StopTime = 300 * time.Millisecond
			s := supervise(t, nil, w)
			st := s.until("its child ignores SIGTERM", func(st stats.Broker) bool {
				return len(st.Processes) == 1 && st.Processes[0].Pid != 0 && strings.Contains(s.log.String(), "ignoring") && strings.Contains(s.log.String(), "child ")
			})
			if kind == "parent" {
				_ = syscall.Kill(st.Processes[0].Pid, syscall.SIGKILL)
			}
			s.until("the next life", func(st stats.Broker) bool { return st.Processes[0].Restarts > 0 && st.Processes[0].State == "running" })
			_, rest, _ := strings.Cut(s.log.String(), "child ")
			pid, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				t.Fatal(err)
			}
			gone := func() bool { // a killed one may wait for init
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				return err != nil || strings.Contains(string(stat), ") Z ")
			}
			s.until("the first child is gone", func(stats.Broker) bool { return gone() })
		})
	}
}

func TestWorkerTablesAreRead(t *testing.T) {
	cfg, err := ParseConfig(`
mps = true
[[worker]]
command = ["own"]
[[model]]
name = "m"
inputs = ["x:f32[4]"]
outputs = ["y:f32[4]"]
[[model.worker]]
command = ["a", "b"]
instances = 3
gpus = [0, 1]
env = { K = "v" }
thread_percentage = 33
stop_time = "2s"
`)
	if err != nil {
		t.Fatal(err)
	}
	w := cfg.Models[0].Workers[0]
	if !cfg.MPS || len(cfg.Workers) != 1 || w.Command[1] != "b" || w.Instances != 3 || w.GPUs[1] != 1 || w.Env["K"] != "v" ||
		w.ThreadPercentage != 33 || w.StopTime != 2*time.Second {
		t.Errorf("%+v", cfg)
	}
	for _, bad := range []string{"instances = 2", `command = ["a"]` + "\ninstances = -1", `command = ["a"]` + "\nthread_percentage = 101", `command = ["a"]` + "\ngpus = [-1]",
		// 0 would pass as the default; A=B is no name.
		`command = ["a"]` + "\nthread_percentage = 0", `command = ["a"]` + "\nstop_time = 0", `command = ["a"]` + "\nenv = { \"A=B\" = \"c\" }"} {
		if _, err := ParseConfig("[[worker]]\n" + bad); err == nil {
			t.Errorf("accepted %q", bad)
		}
	}
}
