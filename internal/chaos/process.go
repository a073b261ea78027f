package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// roleEnv makes this binary play a role; its value is a role as JSON.
const roleEnv = "RINGBATCH_CHAOS_ROLE"

// role is what a child process should be. It reports by lines on standard
// output, and ends when its standard input does.
type role struct {
	Kind   string
	Socket string
	Label  string  `json:",omitempty"` // the step to die at
	Seed   uint64  `json:",omitempty"`
	After  int     `json:",omitempty"` // requests or batches before that
	Poison float64 `json:",omitempty"`
	Load   int     `json:",omitempty"` // goroutines
	Pause  int     `json:",omitempty"` // microseconds between requests
	Files  int     `json:",omitempty"` // RLIMIT_NOFILE
	Log    string  `json:",omitempty"` // file for the log, instead of standard error
	Lease  int     `json:",omitempty"` // milliseconds
	UIDs   []int   `json:",omitempty"`
	Open   bool    `json:",omitempty"`
	Events int     `json:",omitempty"`
}

// process is a child.
type process struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}

	mu    sync.Mutex
	lines []string
	died  time.Time // when it said it would die
}

// spawn starts a child. onLog, if not nil, gets the lines of its log.
func spawn(ro role, onLog func([]byte), attr *syscall.SysProcAttr) (*process, error) {
	text, err := json.Marshal(ro)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command("/proc/self/exe"), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), roleEnv+"="+string(text), "GOMAXPROCS=2")
	p.cmd.SysProcAttr = attr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var stderr io.ReadCloser
	if onLog != nil {
		if stderr, err = p.cmd.StderrPipe(); err != nil {
			return nil, err
		}
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", ro.Kind, err)
	}
	var reading sync.WaitGroup
	reading.Add(1)
	go func() { defer reading.Done(); p.read(stdout) }()
	if stderr != nil {
		reading.Add(1)
		go func() {
			defer reading.Done()
			for sc := bufio.NewScanner(stderr); sc.Scan(); {
				onLog(sc.Bytes())
			}
		}()
	}
	go func() {
		reading.Wait()
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

func (p *process) read(stdout io.Reader) {
	for sc := bufio.NewScanner(stdout); sc.Scan(); {
		line := sc.Text()
		p.mu.Lock()
		var nanos int64
		if n, _ := fmt.Sscanf(line, "dying %d", &nanos); n == 1 {
			p.died = time.Unix(0, nanos)
		} else {
			p.lines = append(p.lines, line)
		}
		p.mu.Unlock()
	}
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// death is when the process died, or said that it was about to.
func (p *process) death() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.died
}

// last is the last line it said.
func (p *process) last() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.lines) == 0 {
		return ""
	}
	return p.lines[len(p.lines)-1]
}

// wait waits for the end; false if it takes longer than d.
func (p *process) wait(d time.Duration) bool {
	select {
	case <-p.ended:
		return true
	case <-time.After(d):
		return false
	}
}

// said waits until it has said something; false if it takes longer than d.
func (p *process) said(line string, d time.Duration) bool {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Millisecond) {
		p.mu.Lock()
		for _, l := range p.lines {
			if l == line {
				p.mu.Unlock()
				return true
			}
		}
		p.mu.Unlock()
		select {
		case <-p.ended:
			return false
		default:
		}
	}
	return false
}

// end asks politely, then insists.
func (p *process) end() {
	p.signal(syscall.SIGCONT)
	p.signal(syscall.SIGTERM)
	if !p.wait(10 * time.Second) {
		p.signal(syscall.SIGKILL)
		p.wait(5 * time.Second)
	}
	_ = p.stdin.Close()
}
