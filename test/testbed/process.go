// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
)

// Process is one process of a bed.
type Process struct {
	bed   *Bed
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	in    sync.Mutex // one command at a time
	log   logTail

	essential bool
	ending    atomic.Bool   // the bed ends it
	ended     chan struct{} // reaped; err may be read
	err       error

	mu      sync.Mutex
	said    []message     // not yet received
	changed chan struct{} // closed at the next message, and at the end
}

// message of a role to its parent.
type message struct {
	Name  string          `json:"name,omitempty"`
	Data  json.RawMessage `json:"data,omitempty"`
	Error string          `json:"error,omitempty"`
}

// order is the first line that a role reads.
type order struct {
	Limits Limits
	Job    json.RawMessage
}

func newProcess(b *Bed, name string) *Process {
	return &Process{bed: b, name: name, ended: make(chan struct{}), changed: make(chan struct{})}
}

// hear takes a line of its standard output.
func (p *Process) hear(line []byte) {
	var m message
	if json.Unmarshal(line, &m) != nil {
		_, _ = p.log.Write(append(line, '\n')) // a stray print
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.said = append(p.said, m)
	close(p.changed)
	p.changed = make(chan struct{})
}

// pipeTime bounds the wait for the output of an ended process: a grandchild may keep
// its pipes.
const pipeTime = 10 * time.Second

// reap waits for the end of the process and of its output.
func (p *Process) reap() {
	p.err = p.cmd.Wait()
	if errors.Is(p.err, exec.ErrWaitDelay) { // it ended well, and another process has its pipes
		p.err = nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.ended)
	close(p.changed)
}

// Pid is the number of the process.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Log is the end of its standard error.
func (p *Process) Log() string { return p.log.String() }

// Signal sends a signal, through the process's pidfd: it can reach no other.
func (p *Process) Signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// Kill ends the process and waits for its end.
func (p *Process) Kill() {
	p.Signal(syscall.SIGKILL)
	<-p.ended
}

// Stop ends the process by SIGTERM, or after d by SIGKILL. It first wakes a process
// that SIGSTOP stopped.
func (p *Process) Stop(d time.Duration) error {
	p.ending.Store(true)
	p.Signal(syscall.SIGCONT)
	p.Signal(syscall.SIGTERM)
	if err := p.Wait(d); err != ErrRunning {
		return err
	}
	p.Kill()
	return fmt.Errorf("%s did not end within %v", p, d)
}

// Ended is closed when the process is gone.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// Running reports whether the process has not ended.
func (p *Process) Running() bool { return p.Wait(0) == ErrRunning }

// ErrRunning says that a process has not ended.
var ErrRunning = errors.New("the process has not ended")

// Wait waits for its end, for at most d, and returns its exit status as an error, nil
// for 0.
func (p *Process) Wait(d time.Duration) error {
	select {
	case <-p.ended:
		return p.err
	default:
	}
	select {
	case <-p.ended:
		return p.err
	case <-time.After(d):
		return ErrRunning
	}
}

// State is the exit state. The process must have ended.
func (p *Process) State() *os.ProcessState { return p.cmd.ProcessState }

// Killed reports whether it ended by SIGKILL. The process must have ended.
func (p *Process) Killed() bool {
	w, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && w.Signaled() && w.Signal() == syscall.SIGKILL
}

func (p *Process) String() string { return fmt.Sprintf("%s (process %d)", p.name, p.Pid()) }

// Send gives the process its next command.
func (p *Process) Send(command any) error {
	text, err := json.Marshal(command)
	if err != nil {
		return err
	}
	p.in.Lock()
	defer p.in.Unlock()
	if _, err := p.stdin.Write(append(text, '\n')); err != nil {
		return p.lost()
	}
	return nil
}

// Receive waits without limit for its next message.
func (p *Process) Receive(into any) error {
	m, err := p.next(nil)
	if err != nil {
		return err
	}
	return m.decode(into)
}

// Expect waits, for at most d, for its next message of that name, and drops the
// messages before it. An error message and the end of the process are errors.
func (p *Process) Expect(name string, into any, d time.Duration) error {
	late := time.After(d)
	for {
		m, err := p.next(late)
		if err != nil {
			return fmt.Errorf("expected %q: %w", name, err)
		}
		if m.Name == name {
			return m.decode(into)
		}
	}
}

// Latest decodes its newest message of that name and drops the messages before it. It
// reports whether there is one, and does not wait.
func (p *Process) Latest(name string, into any) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := len(p.said) - 1; i >= 0; i-- {
		if p.said[i].Name == name {
			p.said = p.said[i:]
			return p.said[0].decode(into) == nil
		}
	}
	return false
}

func (m *message) decode(into any) error {
	if into == nil {
		return nil
	}
	return json.Unmarshal(m.Data, into)
}

// next takes the next message.
func (p *Process) next(late <-chan time.Time) (message, error) {
	for {
		p.mu.Lock()
		if len(p.said) > 0 {
			m := p.said[0]
			p.said = p.said[1:]
			p.mu.Unlock()
			return m, p.complaint(&m)
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-p.ended:
			return message{}, p.lost()
		default:
		}
		select {
		case <-changed:
		case <-late:
			return message{}, fmt.Errorf("%s has nothing to say\n%s", p, p.Log())
		}
	}
}

// complaint is the error that a message reports.
func (p *Process) complaint(m *message) error {
	if m.Error == "" {
		return nil
	}
	err := fmt.Errorf("%s: %s", p.name, m.Error)
	if p.essential {
		return err
	}
	return cmp.Or(p.bed.cause(), err)
}

// lost is the error of a process that no longer reads or writes.
func (p *Process) lost() error {
	if p.bed.ctx.Err() != nil {
		return progress.ErrInterrupted
	}
	if err := p.bed.failed(); err != nil {
		return err
	}
	_ = p.Wait(time.Minute) // its pipes may end first, and then its log is complete
	return fmt.Errorf("%s ended: %v\n%s", p, p.cmd.ProcessState, p.Log())
}

// Essential declares that the process should neither speak nor end. If it does, the bed
// kills all processes and reports that reason.
func (p *Process) Essential() {
	p.essential = true
	p.bed.watched.Store(true)
	go func() {
		err := p.Receive(nil)
		if p.ending.Load() {
			return
		}
		if err == nil {
			err = fmt.Errorf("%s spoke out of turn", p)
		}
		p.bed.fail(err)
	}()
}
