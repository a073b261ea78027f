// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"bufio"
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

	"github.com/ringbatch/ringbatch/stats"
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
// The supervisor's mutex guards what snapshot reads.
type process struct {
	s        *Supervisor
	pool     *pool
	name     string
	instance int // in its pool
	model    string
	cfg      *Worker
	gpu      int           // -1: whatever is visible
	stop     chan struct{} // closed by tell
	over     chan struct{} // closed when it has ended for good
	ready    chan struct{} // closed when a worker of it looks for batches for the first time
	failed   chan struct{} // closed when a life has ended before that
	// lostBatch gets a word when a worker of this life died with a batch; the
	// broker may see the death before or after we do.
	lostBatch chan struct{}
	refused   atomic.Bool // it has said that the MPS server refuses it

	told     bool // to end for good
	asked    int  // the pid of the life that has got SIGTERM
	spare    bool
	pid      int // 0 while it does not run
	life     int // the pid of its present or last life
	lost     int // the pid of the worker of it that left last
	state    string
	since    time.Time
	restarts int
	lastEnd  string

	sessions     int  // attachments of the present life
	came         bool // it has attached, in this life or another
	proven       bool // and looked for batches: ready is closed
	hasFailed    bool // failed is closed
	failedStarts int  // lives in a row that ended before they attached
	begun        bool // this life has attached
}

// tell has the process end for good. SIGTERM has been sent when it returns: a worker
// gets it before the broker hangs up, and does not look for another one, which may be
// there (a take-over). The supervisor's mutex is held.
func (p *process) tell() {
	if !p.told {
		p.told = true
		close(p.stop)
		p.ask()
	}
}

// ask sends SIGTERM to the present life and what it started, once: many programs end
// at once by a second one. The supervisor's mutex is held.
func (p *process) ask() {
	if p.pid != 0 && p.asked != p.pid {
		p.asked = p.pid
		_ = syscall.Kill(-p.pid, syscall.SIGTERM)
	}
}

// run keeps the process alive until it is told to stop. It keeps a thread to
// itself: the kernel ends a child with the thread that made it (Pdeathsig),
// and that must mean with the broker.
func (p *process) run() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	backoff := firstBackoff
	for {
		began := time.Now()
		group, why, stopped := p.live()
		if time.Since(began) >= steadyTime {
			backoff = firstBackoff
		}
		p.set("waiting", 0, why)
		p.lifeOver(stopped)
		p.endRest(group, stopped)
		if stopped {
			p.set("stopped", 0, why)
			return
		}
		p.s.log.Warn("worker process ended, starting it again", "worker", p.name, "why", why, "in", backoff)
		select {
		case <-p.stop:
			p.set("stopped", 0, why)
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
		p.s.mu.Lock()
		p.restarts++
		p.s.mu.Unlock()
	}
}

// live is one life: start, log what it says, wait for its end. group is its
// process group, 0 if it did not start; stopped is true if it was ended on
// request.
func (p *process) live() (group int, why string, stopped bool) {
	cmd := exec.Command(p.cfg.Command[0], p.cfg.Command[1:]...)
	cmd.Env = p.s.environment(p)
	// A group of its own, so that Ctrl-C reaches only the broker, which then
	// ends the worker when its requests are done.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	cmd.WaitDelay = time.Second // a grandchild that keeps the pipe open must not keep us
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, in
	logged := make(chan struct{})
	go func() { defer close(logged); p.logLines(out) }()
	defer func() { _ = in.Close(); <-logged }()

	if err := p.start(cmd); err != nil {
		return 0, err.Error(), false
	}
	select {
	case <-p.lostBatch: // of the life before
	default:
	}
	p.s.log.Info("worker process started", "worker", p.name, "pid", cmd.Process.Pid, "command", strings.Join(p.cfg.Command, " "))
	over, ended := make(chan struct{}), make(chan struct{})
	go func() { defer close(ended); stopped = p.end(cmd, over) }()
	err := cmd.Wait()
	close(over)
	<-ended
	return cmd.Process.Pid, endOf(cmd, err), stopped
}

// start starts the process. The file of the command may be on a mount that does not
// answer, so the supervisor's mutex is not held: loops take it at every attach.
func (p *process) start(cmd *exec.Cmd) error {
	p.s.mu.Lock()
	p.become("starting", 0, "")
	p.s.starting++
	p.s.mu.Unlock()
	readHead(cmd)
	err := cmd.Start()
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.s.starting--
	if err == nil {
		p.become("running", cmd.Process.Pid, "")
	}
	p.s.started.Broadcast()
	return err
}

// mostInterpreters is how many scripts the kernel follows, each run by the next.
const mostInterpreters = 5

// readHead reads the head of the command's file, and of the script's interpreter: what
// exec reads, too. Where it would hang, this hangs first. Go's fork is a vfork that
// its runtime does not see: while exec hangs, the next garbage collection would stop
// every goroutine. A command without a file is left to exec and its error.
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

// endRest ends what the process started and left in its group: the worker
// itself, if the command was a shell, or children that hold on to a GPU. The
// next life would come on top of them. The kernel does not give a group's
// number to others while somebody is in it.
func (p *process) endRest(group int, told bool) {
	left := func() bool {
		for { // the dead among them are ours to reap if the broker is the first process of a container
			if n, _ := syscall.Wait4(-group, nil, syscall.WNOHANG, nil); n <= 0 {
				return syscall.Kill(-group, 0) == nil && aliveIn(group)
			}
		}
	}
	if group == 0 || !left() {
		return
	}
	p.s.log.Warn("worker process ended and left others behind, ending them", "worker", p.name, "group", group)
	if !told {
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

// kinOf is a process, its process group (a shell runs it), and what started it, as far as
// our own children: a worker may be started by a process that starts it again itself, in a
// session of its own (Python's serve, ringbatch torch --processes).
//
// ours says that it ends at a child of ours.
func kinOf(pid int) (kin []int, ours bool) {
	if pid <= 0 { // in a PID namespace that we do not see
		return nil, false
	}
	kin = []int{pid}
	if group, err := syscall.Getpgid(pid); err == nil {
		kin = append(kin, group)
	}
	for len(kin) < mostKin {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		v := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])) // its name may hold anything
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

// aliveIn tells whether somebody in a process group runs. The kernel counts
// the dead too until they are reaped, which some containers never do.
func aliveIn(group int) bool {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range files {
		text, _ := os.ReadFile(f)
		// Its state, parent and group follow its name, which may hold anything.
		if v := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])); len(v) > 2 && v[2] == strconv.Itoa(group) && v[0] != "Z" && v[0] != "X" {
			return true
		}
	}
	return len(files) == 0 // no /proc: who knows
}

const (
	restPoll = 20 * time.Millisecond
	restTime = time.Second // for the killed to be gone
)

// end asks the process to end when the supervisor is told to stop, and kills
// it and what it started if it does not.
func (p *process) end(cmd *exec.Cmd, over <-chan struct{}) bool {
	select {
	case <-over:
	case <-p.stop:
	}
	p.s.mu.Lock()
	told := p.told
	if told {
		p.ask() // it may have been told before it ran
	}
	p.s.mu.Unlock()
	if !told {
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

// maxLogLine is where a worker's line is cut.
const maxLogLine = 4096

// logLines puts what the process says into the log, line by line.
func (p *process) logLines(from io.Reader) {
	r := bufio.NewReaderSize(from, maxLogLine)
	for {
		line, _, err := r.ReadLine() // the rest of a longer line comes as the next
		if err != nil {
			return
		}
		if strings.Contains(string(line), mpsNotReady) {
			p.refused.Store(true)
		}
		p.s.log.Info(string(line), "worker", p.name)
	}
}

func endOf(cmd *exec.Cmd, err error) string {
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && st.Signaled() {
		return fmt.Sprintf("killed by %v", st.Signal())
	}
	var exit *exec.ExitError
	if err == nil || errors.As(err, &exit) || errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Sprintf("exit status %d", cmd.ProcessState.ExitCode())
	}
	return err.Error()
}

func (p *process) set(state string, pid int, why string) {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	p.become(state, pid, why)
}

// become is set with the supervisor's mutex held.
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

// markReady ends the waiting for a new process. The supervisor's mutex is held.
func (p *process) markReady() {
	if !p.proven {
		p.proven = true
		close(p.ready)
	}
}

// lifeOver counts lives that ended before they attached.
func (p *process) lifeOver(stopped bool) {
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
	s := stats.Process{Name: p.name, Model: p.model, Pid: p.pid, State: p.state, Restarts: p.restarts, Attached: p.came, Sessions: p.sessions, Client: p.cfg.Client, FailedStarts: p.failedStarts, LastEnd: p.lastEnd, Spare: p.spare, Command: strings.Join(p.cfg.Command, " ")}
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
