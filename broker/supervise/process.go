// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin/stats"
)

// process is one worker process over all its lives.
//
//	          exec              ends, by itself
//	starting ──────► running ─────────────────► waiting ──┐
//	   ▲                │                        │        │ back-off over
//	   └────────────────┼────────────────────────┼────────┘
//	                    ▼ stop: SIGTERM, SIGKILL ▼ stop
//	                    stopped ◄────────────────┘
//
// The supervisor's mutex guards the fields from stopping on.
type process struct {
	s        *Supervisor
	pool     *pool
	name     string
	instance int // in its pool
	model    string
	cfg      *Worker
	gpu      int           // -1: all are visible
	stop     chan struct{} // closed by endForGood
	over     chan struct{} // closed when it has ended for good
	ready    chan struct{} // closed when a worker of it looks for batches for the first time
	failed   chan struct{} // closed when a life has ended before that
	// lostBatch receives when a worker of this life died with a batch. The broker may see
	// the death before or after the supervisor.
	lostBatch chan struct{}
	refused   atomic.Bool // the MPS server has refused it
	said      string      // the last output of the last life; only run uses it

	stopping   bool // it ends for good
	terminated int  // the pid of the life that has got SIGTERM
	killed     int  // the pid of the life that the broker has killed
	spare      bool
	pid        int // 0 while it does not run
	life       int // the pid of its present or last life
	lost       int // the pid of its worker that left last
	state      string
	since      time.Time
	restarts   int
	lastEnd    string

	sessions     int  // attachments of the present life
	came         bool // it has attached, in this life or another
	proven       bool // ready is closed
	hasFailed    bool // failed is closed
	failedStarts int  // lives in a row that ended before they attached
	begun        bool // this life has attached
}

// endForGood ends the process and starts it no more. It sends SIGTERM before it returns.
// So a worker gets the signal before the broker hangs up, and does not look for another
// broker. The supervisor's mutex is held.
func (p *process) endForGood() {
	if !p.stopping {
		p.stopping = true
		close(p.stop)
		p.terminate()
	}
}

// terminate sends SIGTERM to the present life and its children, once: many programs end
// at once by a second one. The supervisor's mutex is held.
func (p *process) terminate() {
	if p.pid != 0 && p.terminated != p.pid {
		p.terminated = p.pid
		_ = syscall.Kill(-p.pid, syscall.SIGTERM)
	}
}

// run keeps the process alive until stop is closed. It keeps a thread to itself: the
// kernel ends a child with the thread that made it (Pdeathsig).
func (p *process) run() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	backoff := firstBackoff
	for {
		began := time.Now()
		group, why, stopped := p.runLife()
		if time.Since(began) >= steadyTime {
			backoff = firstBackoff
		}
		p.setState("waiting", 0, why)
		p.countLife(stopped)
		p.endChildren(group, stopped)
		if stopped {
			p.setState("stopped", 0, why)
			return
		}
		p.s.log.Warn("worker process ended, starting it again", "worker", p.name, "why", why, "in", backoff, "output", Said(p.said))
		select {
		case <-p.stop:
			p.setState("stopped", 0, why)
			return
		case <-p.lostBatch:
			p.s.log.Info("it died with a batch: starting it again at once", "worker", p.name)
			backoff = firstBackoff
		case <-time.After(backoff):
			backoff = min(2*backoff, lastBackoff)
		}
		if !p.cfg.Client {
			p.s.healMPS(p.refused.Swap(false))
		}
		p.s.locked(func() { p.restarts++ })
	}
}

// runLife starts the process, logs its output, and waits for its end. group is its process
// group, 0 if it did not start. stopped says that endForGood has ended it.
func (p *process) runLife() (group int, why string, stopped bool) {
	cmd := exec.Command(p.cfg.Command[0], p.cfg.Command[1:]...)
	cmd.Env = p.s.environment(p)
	// In another process group the worker does not get Ctrl-C. The broker ends it later.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.WaitDelay = time.Second // should a grandchild keep the pipe open
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, in
	logged := make(chan struct{})
	go func() { defer close(logged); p.said = p.logLines(out) }()
	defer func() { _ = in.Close(); <-logged }()

	if err := p.startCommand(cmd); err != nil {
		return 0, err.Error(), false
	}
	select {
	case <-p.lostBatch: // of the last life
	default:
	}
	p.s.log.Info("worker process started", "worker", p.name, "pid", cmd.Process.Pid, "command", strings.Join(p.cfg.Command, " "))
	over, ended := make(chan struct{}), make(chan struct{})
	go func() { defer close(ended); stopped = p.endCommand(cmd, over) }()
	err := cmd.Wait()
	close(over)
	<-ended
	return cmd.Process.Pid, endOf(cmd, err) + p.killer(cmd, stopped), stopped
}

// startCommand starts the process. The command's file may be on a mount that hangs. So
// the supervisor's mutex, which loops take at every attach, is not held.
func (p *process) startCommand(cmd *exec.Cmd) error {
	p.s.mu.Lock()
	p.become("starting", 0, "")
	p.s.starting++
	p.s.mu.Unlock()
	err := p.readAndStart(cmd)
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.s.starting--
	if err == nil {
		p.become("running", cmd.Process.Pid, "")
	}
	p.s.started.Broadcast()
	return err
}

// readAndStart starts the process after it has read its file. It gives up when stop is
// closed: a broker must end, also if a mount hangs.
func (p *process) readAndStart(cmd *exec.Cmd) error {
	read := make(chan struct{})
	go func() { defer close(read); readHead(cmd) }()
	select {
	case <-read:
		return cmd.Start()
	case <-p.stop:
		return errors.New("it was stopped before its file could be read")
	}
}

// mostInterpreters is the kernel's limit of scripts that interpret scripts.
const mostInterpreters = 5

// readHead reads the head of the command's file, and of a script's interpreter, as exec
// does. On a mount that hangs it hangs instead of exec. Go's fork is a vfork that its
// runtime does not see: while exec hangs, the next garbage collection would stop every
// goroutine. exec reports a missing file.
func readHead(cmd *exec.Cmd) {
	for path, n := cmd.Path, 0; cmd.Err == nil && n < mostInterpreters; n++ {
		f, err := os.Open(path)
		if err != nil {
			return // a program may be executable and not readable
		}
		head := make([]byte, 256)
		length, _ := f.Read(head)
		_ = f.Close()
		line, _, _ := bytes.Cut(head[:length], []byte("\n"))
		words := bytes.Fields(bytes.TrimPrefix(line, []byte("#!")))
		if !bytes.HasPrefix(line, []byte("#!")) || len(words) == 0 {
			return
		}
		path = string(words[0])
	}
}

// endChildren ends the processes that a life has left in its group: the worker itself, if
// the command was a shell, or children that hold on to a GPU. The kernel does not give
// the group's number to others while a process is in it.
func (p *process) endChildren(group int, terminated bool) {
	left := func() bool {
		for { // as the first process of a container, the broker reaps the dead
			if n, _ := syscall.Wait4(-group, nil, syscall.WNOHANG, nil); n <= 0 {
				return syscall.Kill(-group, 0) == nil && aliveIn(group)
			}
		}
	}
	if group == 0 || !left() {
		return
	}
	p.s.log.Warn("worker process ended and left others behind, ending them", "worker", p.name, "group", group)
	if !terminated {
		_ = syscall.Kill(-group, syscall.SIGTERM)
	}
	for end := time.Now().Add(p.cfg.StopTime); left() && time.Now().Before(end); {
		select {
		case <-time.After(restPoll):
		case <-p.s.hurry:
			end = time.Now()
		}
	}
	if left() {
		_ = syscall.Kill(-group, syscall.SIGKILL)
	}
	for end := time.Now().Add(restTime); left() && time.Now().Before(end); {
		time.Sleep(restPoll)
	}
}

// mostKin bounds how far kinOf looks.
const mostKin = 8

// kinOf is a process, its process group (a shell may run it), and its ancestors up to a
// child of ours. A worker's parent may restart the worker itself, in another session
// (Python's serve, ringbatch torch --processes). ours says that there is such a child.
func kinOf(pid int) (kin []int, ours bool) {
	if pid <= 0 { // in a foreign PID namespace
		return nil, false
	}
	kin = []int{pid}
	if group, err := syscall.Getpgid(pid); err == nil {
		kin = append(kin, group)
	}
	for len(kin) < mostKin {
		v := statFields(fmt.Sprintf("/proc/%d/stat", pid))
		if len(v) < 2 {
			break
		}
		parent, _ := strconv.Atoi(v[1])
		if parent <= 1 || parent == os.Getpid() {
			return kin, parent == os.Getpid()
		}
		kin, pid = append(kin, parent), parent
	}
	return kin, false
}

// statFields are the fields after a process's name: state, parent, group, and so on.
func statFields(file string) []string {
	text, _ := os.ReadFile(file)
	return strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
}

// aliveIn says whether a process of a group runs. The kernel also counts dead processes
// until they are reaped, which some containers never do.
func aliveIn(group int) bool {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range files {
		if v := statFields(f); len(v) > 2 && v[2] == strconv.Itoa(group) && v[0] != "Z" && v[0] != "X" {
			return true
		}
	}
	return len(files) == 0 // without /proc, maybe
}

const (
	restPoll = 20 * time.Millisecond
	restTime = time.Second // for the killed to be gone
)

// endCommand waits until the process ends, or stop is closed. Then it kills the process
// and its children after StopTime. It returns whether stop was closed.
func (p *process) endCommand(cmd *exec.Cmd, over <-chan struct{}) bool {
	select {
	case <-over:
	case <-p.stop:
	}
	p.s.mu.Lock()
	stopping := p.stopping
	if stopping {
		p.terminate() // endForGood may have come before the start
	}
	p.s.mu.Unlock()
	if !stopping {
		return false
	}
	select {
	case <-over:
		return true
	case <-time.After(p.cfg.StopTime):
	case <-p.s.hurry:
	}
	p.s.log.Warn("worker process does not end, killing it", "worker", p.name, "pid", cmd.Process.Pid)
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	<-over
	return true
}

// killer says that SIGKILL did not come from the broker, if that is so.
func (p *process) killer(cmd *exec.Cmd, stopped bool) string {
	st, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	if stopped || st.Signal() != syscall.SIGKILL || p.killed == p.life {
		return ""
	}
	return ", not by the broker"
}

func endOf(cmd *exec.Cmd, err error) string {
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && st.Signaled() {
		return "killed by " + unix.SignalName(st.Signal())
	}
	var exit *exec.ExitError
	if err == nil || errors.As(err, &exit) || errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Sprintf("exit status %d", cmd.ProcessState.ExitCode())
	}
	return err.Error()
}

func (p *process) setState(state string, pid int, why string) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.become(state, pid, why)
}

// become is setState with the supervisor's mutex held.
func (p *process) become(state string, pid int, why string) {
	p.state, p.pid, p.since = state, pid, time.Now()
	if pid != 0 {
		p.life = pid
	}
	if why != "" {
		p.lastEnd = why
	}
}

// countAttached counts a session of the present life. The supervisor's mutex is held.
func (p *process) countAttached() {
	p.sessions++
	p.came, p.begun, p.failedStarts = true, true, 0
}

// markReady ends awaitReady. The supervisor's mutex is held.
func (p *process) markReady() {
	if !p.proven {
		p.proven = true
		close(p.ready)
	}
}

func (p *process) countLife(stopped bool) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	if !p.begun && !stopped {
		p.failedStarts++
	}
	if !p.proven && !stopped && !p.hasFailed {
		p.hasFailed = true
		close(p.failed)
	}
	p.begun, p.sessions = false, 0
}

// snapshot is called with the supervisor's mutex held.
func (p *process) snapshot() stats.Process {
	s := stats.Process{
		Name: p.name, Model: p.model, Command: strings.Join(p.cfg.Command, " "), Client: p.cfg.Client, Spare: p.spare,
		Pid: p.pid, State: p.state, Restarts: p.restarts, FailedStarts: p.failedStarts, LastEnd: p.lastEnd,
		Attached: p.came, Sessions: p.sessions,
	}
	if s.State == "" {
		s.State = "waiting"
	} else {
		s.SinceS = time.Since(p.since).Seconds()
	}
	if p.gpu >= 0 {
		s.GPU = &p.gpu
	}
	return s
}
