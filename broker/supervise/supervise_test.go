// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testlog"
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
	case "worker": // ends on SIGTERM
		end := make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM)
		fmt.Println("working")
		<-end
	case "stubborn": // does not end when asked to
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ignoring SIGTERM")
		time.Sleep(time.Hour)
	case "parent", "deserter": // has a child that does not end when asked to; the deserter leaves it
		child := exec.Command("/bin/sh", "-c", "trap '' TERM; echo ignoring; sleep 1000; :")
		child.Stdout = os.Stdout
		if err := child.Start(); err != nil {
			os.Exit(3)
		}
		fmt.Println("child", child.Process.Pid, "end")
		if role == "parent" {
			time.Sleep(time.Hour)
		}
		time.Sleep(500 * time.Millisecond) // for it to ignore SIGTERM
	case "broken":
		fmt.Println("cannot go on")
		os.Exit(7)
	}
	os.Exit(0)
}

// supervised is a supervisor with the workers of one model.
type supervised struct {
	*Supervisor
	t   *testing.T
	log *testlog.Log
}

func start(t *testing.T, mps bool, workers ...Worker) *supervised {
	t.Helper()
	return startWith(t, mps, nil, workers...)
}

func startWith(t *testing.T, mps bool, faulted func(), workers ...Worker) *supervised {
	t.Helper()
	for i := range workers {
		must.Do(t, workers[i].Fill())
	}
	log := &testlog.Log{}
	s := &supervised{New(slog.New(slog.NewTextHandler(log, nil)), filepath.Join(t.TempDir(), "b.sock")), t, log}
	s.Faulted = faulted
	s.Start(mps, Group{Model: "m", Workers: workers})
	t.Cleanup(s.end)
	return s
}

// end stops the supervisor and waits for it.
func (s *supervised) end() {
	s.Stop()
	s.Wait()
}

func (s *supervised) processes() []stats.Process {
	list, _ := s.Snapshot()
	return list
}

// until waits for a condition.
func (s *supervised) until(what string, ok func([]stats.Process) bool) []stats.Process {
	s.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		list := s.processes()
		if ok(list) {
			return list
		}
		if time.Now().After(end) {
			s.t.Fatalf("%s: never happened; processes %+v\n%s", what, list, s.log)
		}
	}
}

// says is the condition that n processes run and the log has this text n times.
func (s *supervised) says(text string, n int) func([]stats.Process) bool {
	return func(list []stats.Process) bool {
		for _, p := range list {
			if p.State != "running" {
				return false
			}
		}
		return len(list) >= n && strings.Count(s.log.String(), text) >= n
	}
}

func role(name string) Worker {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return Worker{Command: []string{self}, Env: map[string]string{roleEnv: name}}
}

func TestDeclaredWorkersAreStartedWithTheirEnvironment(t *testing.T) {
	w := role("worker")
	w.Instances, w.GPUs, w.ThreadPercentage = 3, []int{4, 5}, 40
	s := start(t, false, w)
	for i, p := range s.until("three workers work", s.says("msg=working", 3)) {
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

// nextLife waits until the first process runs as another one than pid.
func (s *supervised) nextLife(pid int) stats.Process {
	s.t.Helper()
	return s.until("the next life", func(list []stats.Process) bool {
		return len(list) > 0 && list[0].State == "running" && list[0].Pid != pid
	})[0]
}

func TestAWorkerThatIsKilledIsStartedAgain(t *testing.T) {
	s := start(t, false, role("worker"))
	first := s.until("it runs", s.says("msg=working", 1))[0].Pid
	if !s.MayServe("m") {
		t.Error("a worker that is about to attach may serve its model")
	}
	s.Attached(first, s.AwaitStart(first))
	if s.MayServe("m") {
		t.Error("an attached worker is still expected")
	}
	must.Do(t, syscall.Kill(first, syscall.SIGKILL))
	p := s.nextLife(first)
	s.Left(first, false)
	s.Attached(p.Pid, s.AwaitStart(p.Pid))
	if p.Restarts != 1 || s.Restarts(p.Pid) != 1 || p.LastEnd != "killed by SIGKILL, not by the broker" || p.FailedStarts != 0 || !p.Attached {
		t.Errorf("process %+v, restarts %d", p, s.Restarts(p.Pid))
	}
	s.Left(p.Pid, false)
	if len(s.attached) != 0 {
		t.Errorf("it remembers %v", s.attached)
	}
}

func TestAWorkerThatIsReplacedIsEndedAndStartedAgain(t *testing.T) {
	for kind, said := range map[string]string{"worker": "msg=working", "stubborn": "msg=\"ignoring SIGTERM\""} {
		t.Run(kind, func(t *testing.T) {
			w := role(kind)
			w.StopTime = 50 * time.Millisecond
			s := start(t, false, w)
			first := s.until("it listens to signals", s.says(said, 1))[0].Pid
			if s.Replace(first) {
				t.Error("a process was replaced that is no worker")
			}
			s.Attached(first, s.AwaitStart(first))
			if !s.Replace(first) {
				t.Error("the process of a worker was not replaced")
			}
			if p := s.nextLife(first); p.Restarts != 1 {
				t.Errorf("process %+v", p)
			}
		})
	}
}

func TestAWorkerThatKeepsFailingIsStartedLessAndLessOften(t *testing.T) {
	s := start(t, false, role("broken"))
	s.until("four lives", func(list []stats.Process) bool {
		return len(list) == 1 && list[0].Restarts >= 3 && list[0].FailedStarts >= 3 && !list[0].Attached
	})
	if !s.MayServe("m") || s.MayServe("other") {
		t.Error("a worker of m that is being started again may serve m, and nothing else")
	}
	log := s.log.String()
	for _, want := range []string{"cannot go on", "exit status 7", "in=100ms", "in=200ms", "in=400ms"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
}

// With the usual back-off seven lives would wait for 100 ms, 200 ms ... 6.4 s.
func TestAWorkerThatDiesWithABatchIsStartedAgainAtOnce(t *testing.T) {
	shell := role("worker") // the shell is our child, the worker is in its group
	shell.Command = []string{"/bin/sh", "-c", shell.Command[0] + "; true"}
	session := role("worker") // in another session
	session.Command = []string{"/bin/sh", "-c", "trap 'kill $!; exit' TERM; setsid " + session.Command[0] + " & wait"}
	for kind, w := range map[string]Worker{"child": role("worker"), "run by a shell": shell, "in another session": session} {
		t.Run(kind, func(t *testing.T) {
			s := start(t, false, w)
			pid := 0
			for life := range 7 {
				pid = s.nextLife(pid).Pid
				worker := pid
				if kind != "child" {
					s.until("the shell has run it", func([]stats.Process) bool {
						worker = childOf(pid)
						group, _ := syscall.Getpgid(worker)
						return worker != 0 && (group == worker) == (kind == "in another session")
					})
				}
				s.Attached(worker, s.AwaitStart(worker))
				if !s.processes()[0].Attached {
					t.Fatal("it is not known as ours")
				}
				must.Do(t, syscall.Kill(worker, syscall.SIGKILL))
				if life%2 == 1 { // the supervisor saw it first
					s.until("it sees the death", func(list []stats.Process) bool { return list[0].Pid != pid })
				}
				s.Left(worker, true)
			}
			pid = s.nextLife(pid).Pid
			s.until("the last shell has its child", func([]stats.Process) bool { return kind == "child" || childOf(pid) != 0 })
			// On a slow machine Left may come after the restart, but not five times in a row.
			if log := s.log.String(); strings.Contains(log, "in=1.6s") || strings.Count(log, "at once") == 0 {
				t.Errorf("it was made to wait:\n%s", log)
			}
		})
	}
}

// childOf is a child of a process, 0 if it has none.
func childOf(pid int) int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	first, _, _ := strings.Cut(string(text), " ")
	child, _ := strconv.Atoi(first)
	return child
}

func TestAWorkerThatLooksForBatchesIsWaitedForNoLonger(t *testing.T) {
	s := New(slog.Default(), "")
	p := &process{s: s, name: "quick", cfg: &Worker{}, ready: make(chan struct{}), failed: make(chan struct{}), over: make(chan struct{})}
	s.procs = append(s.procs, p)
	child := exec.Command("sleep", "1000")
	must.Do(t, p.startCommand(child))
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	s.Attached(child.Process.Pid, s.AwaitStart(child.Process.Pid))
	if !s.AwaitsReady(child.Process.Pid) {
		t.Error("nobody waits for it")
	}
	s.Ready(child.Process.Pid)
	must.Do(t, p.awaitReady(t.Context()))
	if s.AwaitsReady(child.Process.Pid) {
		t.Error("it is still waited for")
	}
	if s.Left(child.Process.Pid, false); p.sessions != 0 || s.Restarts(child.Process.Pid) != 0 {
		t.Fatalf("%d sessions after its only one was over", p.sessions)
	}
}

func TestWorkersEndWithTheirSupervisor(t *testing.T) {
	stubborn := role("stubborn")
	stubborn.StopTime = 300 * time.Millisecond
	s := start(t, false, role("worker"), stubborn)
	s.until("one works", s.says("msg=working", 1))
	list := s.until("the other one ignores SIGTERM", s.says("ignoring SIGTERM", 1))
	s.Stop() // sends SIGTERM before the broker hangs up on the workers
	s.mu.Lock()
	for i, p := range s.procs {
		if p.terminated != list[i].Pid {
			t.Errorf("%s (%d) has not got SIGTERM yet", p.name, list[i].Pid)
		}
	}
	s.mu.Unlock()
	s.end()
	for _, p := range list {
		if err := syscall.Kill(p.Pid, 0); err != syscall.ESRCH {
			t.Errorf("process %s (%d) still there: %v", p.Name, p.Pid, err)
		}
	}
	if log := s.log.String(); strings.Count(log, "killing it") != 1 || strings.Contains(log, "starting it again") {
		t.Error(log)
	}
}

func TestWhoIsInAHurryWaitsForNoStopTime(t *testing.T) {
	stubborn, parent := role("stubborn"), role("parent")
	stubborn.StopTime, parent.StopTime = time.Hour, time.Hour
	s := start(t, false, stubborn, parent)
	t.Cleanup(s.Hurry)
	list := s.until("one ignores SIGTERM, and the other's child does", s.says("ignoring", 2))
	s.Stop() // as a drain does
	s.Hurry()
	s.Hurry()
	s.Wait()
	for _, p := range list {
		if err := syscall.Kill(-p.Pid, 0); err == nil && aliveIn(p.Pid) {
			t.Errorf("some of %s (%d) are still there", p.Name, p.Pid)
		}
	}
}

// A reload must not start one, nor a start that MPS has held up.
func TestNoClientIsStartedAfterClientsWereStopped(t *testing.T) {
	client := role("worker")
	client.Client = true
	s := start(t, false, client)
	s.until("it works", s.says("msg=working", 1))
	s.StopClients()
	client.Env = role("stubborn").Env
	must.Do(t, client.Fill())
	if err := s.Apply(t.Context(), Group{Model: "m", Workers: []Worker{client}}); !errors.Is(err, status.ErrDraining) {
		t.Error(err)
	}
	s.Add(Group{Model: "n", Workers: []Worker{client}})
	s.StartClients(Group{Model: "o", Workers: []Worker{client}})
	if list := s.processes(); len(list) > 0 {
		t.Errorf("%+v", list)
	}
}

// A shell that is killed must not leave the worker it ran, nor a worker its
// children: each life would add to them.
func TestNothingThatAWorkerStartedOutlivesIt(t *testing.T) {
	for _, kind := range []string{"parent", "deserter"} {
		t.Run(kind, func(t *testing.T) {
			w := role(kind)
			w.StopTime = 300 * time.Millisecond
			s := start(t, false, w)
			list := s.until("its child ignores SIGTERM", func(list []stats.Process) bool {
				log := s.log.String()
				return len(list) == 1 && list[0].Pid != 0 && strings.Contains(log, "ignoring") && strings.Contains(log, "child ")
			})
			if kind == "parent" {
				_ = syscall.Kill(list[0].Pid, syscall.SIGKILL)
			}
			s.nextLife(list[0].Pid)
			_, rest, _ := strings.Cut(s.log.String(), "child ")
			pid, err := strconv.Atoi(strings.Fields(rest)[0])
			must.Do(t, err)
			gone := func() bool { // a killed one may wait for init
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				return err != nil || strings.Contains(string(stat), ") Z ")
			}
			s.until("the first child is gone", func([]stats.Process) bool { return gone() })
		})
	}
}

func TestAModelThatSleepsHasNoProcessesUntilItWakes(t *testing.T) {
	w := role("worker")
	w.Most, w.Spares = 4, 1
	s := start(t, false, w)
	list := s.until("it works, and its spare", s.says("msg=working", 2))
	s.Sleep("m")
	for _, p := range list {
		if err := syscall.Kill(p.Pid, 0); err != syscall.ESRCH {
			t.Errorf("process %s (%d) still there: %v", p.Name, p.Pid, err)
		}
	}
	s.Resize("m", 3)
	if list := s.processes(); len(list) > 0 {
		t.Errorf("it sleeps and has %+v", list)
	}
	must.Do(t, s.Restart(t.Context(), "m"))
	s.Wake("m")
	s.until("three work, and a spare", func(list []stats.Process) bool {
		return len(list) == 4 && strings.Count(s.log.String(), "msg=working") == 6
	})
	s.Resize("m", 1)
	if list := s.processes(); len(list) != 2 {
		t.Errorf("one and a spare should be left: %+v", list)
	}
	if err := s.Scale(t.Context(), "m", 2); err == nil {
		t.Error("the number follows the load, and was set by hand")
	}
}

func TestAModelThatSleepsWhileItIsDeclaredWakesWithAllItsProcesses(t *testing.T) {
	w := Worker{Command: []string{"/no/such/worker"}, Instances: maxInstances}
	must.Do(t, w.Fill())
	for range 10 {
		s := start(t, false)
		declared := make(chan error, 1)
		go func() { declared <- s.Apply(t.Context(), Group{Model: "m", Workers: []Worker{w}}) }()
		for len(s.processes()) == 0 { // until would be too late
			runtime.Gosched()
		}
		s.Sleep("m")
		must.Do(t, <-declared)
		s.Wake("m")
		if list := s.processes(); len(list) != w.Instances {
			t.Errorf("%d processes", len(list))
		}
		s.Stop()
	}
}
