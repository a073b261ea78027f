// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
)

// hangingExec makes a copy of the test binary that no process can open, nor exec, until
// release is called: a lease on it stands in for a network mount that does not answer.
func hangingExec(t *testing.T, script bool) (path string, release func()) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "worker")
	from, err := os.Open(role("").Command[0])
	must.Do(t, err)
	defer from.Close()
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o700)
	must.Do(t, err)
	if _, err := io.Copy(to, from); err != nil || to.Close() != nil {
		t.Fatal(err)
	}
	held, err := os.Open(path)
	must.Do(t, err)
	t.Cleanup(func() { held.Close() })
	if _, err := unix.FcntlInt(held.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Skipf("no leases here: %v", err)
	}
	release = func() {
		if _, err := unix.FcntlInt(held.Fd(), unix.F_SETLEASE, unix.F_UNLCK); err != nil {
			t.Error(err)
		}
	}
	if !script {
		return path, release
	}
	text := filepath.Join(t.TempDir(), "script")
	must.Do(t, os.WriteFile(text, []byte("#!"+path+"\n"), 0o700))
	return text, release
}

// An exec that hangs must stop neither the loops, which report attached workers, nor the
// garbage collection, which waits for every thread.
func TestAnExecThatHangsKeepsNoOtherProcess(t *testing.T) {
	for _, kind := range []string{"program", "script"} {
		t.Run(kind, func(t *testing.T) {
			path, release := hangingExec(t, kind == "script")
			hanging := role("worker")
			hanging.Command = []string{path}
			s := start(t, false, role("worker"), hanging)
			ready := func(list []stats.Process) bool {
				return len(list) == 2 && list[0].State == "running" && list[1].State == "starting"
			}
			other := s.until("one runs, one hangs", ready)[0].Pid
			for range 3 {
				runtime.GC()
				s.Attached(other, s.AwaitStart(other))
				s.Ready(other)
				s.Left(other, true)
			}
			if list := s.processes(); !ready(list) {
				t.Errorf("the lease has run out: %+v", list)
			}
			release()
			s.until("it runs", s.says("msg=working", 2))
		})
	}
}

// A pipe that no process writes stands in for a mount that never answers.
func TestASupervisorEndsThoughAnExecHangs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "worker")
	must.Do(t, unix.Mkfifo(path, 0o700))
	hanging := role("worker")
	hanging.Command = []string{path}
	s := start(t, false, hanging)
	s.until("it hangs", func(list []stats.Process) bool { return len(list) == 1 && list[0].State == "starting" })
	ended := make(chan struct{})
	go func() { defer close(ended); s.Stop(); s.Wait() }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("it waits for a process that never started")
	}
	if held, err := os.OpenFile(path, os.O_RDWR, 0); err == nil { // the reader goes on
		held.Close()
	}
}

// It may attach before the supervisor has noted its pid, and must not be taken for a worker
// of others: a spare would serve.
func TestAWorkerIsKnownBeforeItAttaches(t *testing.T) {
	s := New(slog.Default(), "")
	child := exec.Command("sleep", "1000")
	must.Do(t, child.Start())
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	p := &process{s: s, cfg: &Worker{}, spare: true, pool: &pool{}}
	s.procs, s.starting = append(s.procs, p), 2 // of which another one hangs
	known := make(chan bool, 1)
	go func() {
		s.Attached(child.Process.Pid, s.AwaitStart(child.Process.Pid))
		known <- s.AssignRole(child.Process.Pid)
	}()
	s.AwaitStart(os.Getppid()) // is no child of ours
	s.mu.Lock()
	p.become("running", child.Process.Pid, "")
	s.starting--
	s.started.Broadcast()
	s.mu.Unlock()
	if !<-known {
		t.Error("a spare was taken for a worker of others")
	}
}

// A worker in a PID namespace that the broker does not see has pid 0, like a process
// that has not started.
func TestAWorkerWithoutAPidIsNoneOfOurs(t *testing.T) {
	s := start(t, false, Worker{Command: []string{"/no/such/worker"}, Spares: 1})
	list := s.until("nothing starts", func(list []stats.Process) bool { return len(list) == 2 && list[1].FailedStarts > 0 })
	if p := list[1]; p.State == "running" || !strings.Contains(p.LastEnd, "no such file") {
		t.Errorf("%+v", p)
	}
	s.Attached(0, s.AwaitStart(0))
	if list := s.processes(); list[0].Attached || list[1].Attached || s.AssignRole(0) || s.AwaitsReady(0) {
		t.Errorf("it counts as %+v", list)
	}
	s.Left(0, true)
}
