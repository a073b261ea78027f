// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/progress"
)

// Spec describes a process to start: this binary in a role, or any command.
type Spec struct {
	Role    string
	Job     any      // given to the role
	Command []string // instead of a role
	Program []string // instead of a role: a program that speaks JSON and takes its job from its arguments
	Output  *os.File // of the command, instead of its log

	Procs  int               // GOMAXPROCS; 0: Go's default
	Env    []string          // more of the environment
	Files  []*os.File        // descriptors 3, 4 …
	OnLog  func(line []byte) // gets its standard error by lines
	Limits Limits
	Wrap   []string // a command that runs the role's binary, like unshare

	OwnPIDs bool // in a new PID namespace, as its first process; root only
	UID     int  // run as this user, from a copy of the binary; root only
}

// Limits that a process sets for itself before its role begins.
type Limits struct {
	Group       string // folder of a control group to join
	AddressMiB  int    // further address space
	Descriptors int    // descriptors in all
	Deny        []Denial
}

// roleEnv names the role of a bed's process.
const roleEnv = "RINGBATCH_TESTBED_ROLE"

// Start starts a process and gives it its job.
func (b *Bed) Start(s Spec) (*Process, error) {
	p := newProcess(b, s.name())
	if err := b.command(p, &s); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	if err := b.run(p); err != nil {
		return nil, err
	}
	if s.Role == "" {
		return p, nil
	}
	job, err := json.Marshal(s.Job)
	if err != nil {
		return nil, err
	}
	return p, p.Send(order{s.Limits, job}) // without the lock, which lost takes
}

// StartReady starts a process and waits until it is ready.
func (b *Bed) StartReady(s Spec) (*Process, error) {
	all, err := b.StartAll(1, func(int) Spec { return s })
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// StartAll starts n processes and waits until all are ready.
func (b *Bed) StartAll(n int, spec func(i int) Spec) ([]*Process, error) {
	all := make([]*Process, n)
	for i := range all {
		var err error
		if all[i], err = b.Start(spec(i)); err != nil {
			return nil, err
		}
	}
	for _, p := range all {
		if err := p.Receive(nil); err != nil {
			return nil, err
		}
	}
	return all, nil
}

func (s *Spec) name() string {
	if s.Role != "" {
		return s.Role
	}
	return filepath.Base(append(s.Command, s.Program...)[0])
}

// command prepares the start of p.
func (b *Bed) command(p *Process, s *Spec) (err error) {
	// In a new process group, Ctrl-C reaches only the parent, which then ends the others.
	// The kernel kills the child when the parent dies.
	attr := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	switch {
	case len(s.Program) > 0:
		p.cmd = exec.Command(s.Program[0], s.Program[1:]...)
		p.cmd.Stdout = &lines{each: p.hear}
	case s.Role == "":
		p.cmd = exec.Command(s.Command[0], s.Command[1:]...)
		p.cmd.Stdout = &p.log
	default:
		p.cmd = exec.Command(cmp.Or(os.Getenv("RINGBATCH_TEST_SELF"), "/proc/self/exe")) // under an emulator that is the emulator
		p.cmd.Args[0] = filepath.Base(os.Args[0]) + " " + s.Role                         // for ps
		p.cmd.Stdout = &lines{each: p.hear}
	}
	p.cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // -race: end at once
	if s.Role != "" {
		p.cmd.Env = append(p.cmd.Env, roleEnv+"="+s.Role)
	}
	if len(s.Wrap) > 0 {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		out := p.cmd.Stdout
		p.cmd = exec.Command(s.Wrap[0], append(s.Wrap[1:len(s.Wrap):len(s.Wrap)], self)...)
		p.cmd.Stdout, p.cmd.Env = out, append(os.Environ(), roleEnv+"="+s.Role)
	}
	if s.UID != 0 {
		if p.cmd.Path, err = b.copySelf(); err != nil {
			return err
		}
		p.cmd.Dir = "/"
		attr.Credential = &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.UID)}
	}
	if s.OwnPIDs {
		attr.Cloneflags = unix.CLONE_NEWPID
	}
	if s.Procs > 0 {
		p.cmd.Env = append(p.cmd.Env, "GOMAXPROCS="+strconv.Itoa(s.Procs))
	}
	p.cmd.Env = append(p.cmd.Env, s.Env...)
	p.cmd.ExtraFiles = s.Files
	p.cmd.Stderr = &p.log
	if s.Output != nil {
		p.cmd.Stdout, p.cmd.Stderr = s.Output, s.Output
	}
	p.log.each = s.OnLog
	p.cmd.SysProcAttr = attr
	p.cmd.WaitDelay = pipeTime
	p.stdin, err = p.cmd.StdinPipe()
	return err
}

// run starts the process, unless the bed's context has ended.
func (b *Bed) run(p *Process) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ctx.Err() != nil {
		return progress.ErrInterrupted
	}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	b.processes = append(b.processes, p)
	go p.reap()
	return nil
}

// copySelf copies this binary to a place where every user may run it.
func (b *Bed) copySelf() (string, error) {
	if err := os.Chmod(b.Dir, 0o755); err != nil {
		return "", err
	}
	path := b.Path("self")
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return "", err
	}
	return path, os.WriteFile(path, exe, 0o755)
}

func (l *Limits) apply() error {
	if l.Group != "" {
		if err := os.WriteFile(l.Group+"/cgroup.procs", []byte("0"), 0o644); err != nil { // 0: the writer
			return err
		}
	}
	if l.AddressMiB > 0 {
		var pages uint64
		text, err := os.ReadFile("/proc/self/statm")
		if err != nil {
			return err
		}
		if _, err := fmt.Sscan(string(text), &pages); err != nil {
			return err
		}
		limit := pages*uint64(os.Getpagesize()) + uint64(l.AddressMiB)<<20
		if err := unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: limit, Max: limit}); err != nil {
			return err
		}
	}
	if n := uint64(l.Descriptors); n > 0 {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return err
		}
	}
	return deny(l.Deny)
}
