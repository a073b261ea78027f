package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// roleEnv names the role of a process that the benchmark started by running
// itself again.
const roleEnv = "RINGBATCH_BENCH_ROLE"

// fleet is all processes of one benchmark. When its context ends, or when it
// is closed, none of them is left.
type fleet struct {
	ctx  context.Context
	dir  string // private folder for sockets, gone afterwards
	stop func() bool

	mu    sync.Mutex
	procs []*proc
	err   error // of a process that must not have ended
}

func newFleet(ctx context.Context) (*fleet, error) {
	dir, err := os.MkdirTemp("", "ringbatch-bench-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for sockets: %w", err)
	}
	f := &fleet{ctx: ctx, dir: dir}
	f.stop = context.AfterFunc(ctx, f.kill)
	return f, nil
}

// path is a file in the fleet's folder.
func (f *fleet) path(name string) string { return filepath.Join(f.dir, name) }

// fail ends everything because of one process that went wrong.
func (f *fleet) fail(err error) {
	f.mu.Lock()
	if f.err == nil {
		f.err = err
	}
	f.mu.Unlock()
	f.kill()
}

// failed is why everything was ended, if it was.
func (f *fleet) failed() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

func (f *fleet) kill() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, p := range f.procs {
		_ = p.cmd.Process.Kill()
	}
}

// close ends every process and removes the folder.
func (f *fleet) close() {
	f.stop()
	f.mu.Lock()
	procs := f.procs
	f.procs = nil
	f.mu.Unlock()
	endAll(procs)
	_ = os.RemoveAll(f.dir)
}

// end ends some processes before the others, the first ones first.
func (f *fleet) end(procs ...*proc) {
	endAll(procs)
	f.mu.Lock()
	defer f.mu.Unlock()
	kept := f.procs[:0]
	for _, p := range f.procs {
		if !p.over {
			kept = append(kept, p)
		}
	}
	f.procs = kept
}

func endAll(procs []*proc) {
	// All are marked before the first one ends: a worker that complains of its
	// broker's end before we come to it is not why the run should fail.
	for _, p := range procs {
		p.ending.Store(true)
	}
	for _, p := range procs {
		_ = p.stdin.Close()
	}
	for _, p := range procs {
		p.wait(2 * time.Second)
	}
}

// proc is one process of the fleet. It is told what to do in JSON values on
// its standard input, and answers on its standard output.
type proc struct {
	f     *fleet
	role  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	in    *json.Encoder
	out   *json.Decoder
	errs  *tail

	watched bool        // by mustNotSpeak: what it says is a cause, not a consequence
	ending  atomic.Bool // it was told to end
	waited  sync.Once
	over    bool // it was reaped; only whoever ends processes reads it
}

// spawn describes a process to start.
type spawn struct {
	role  string
	job   any        // sent first
	procs int        // GOMAXPROCS, 0 for Go's default
	env   []string   // more of the environment
	files []*os.File // descriptors 3, 4 …
}

// start runs this binary again in a role, and waits until it is ready.
func (f *fleet) start(s spawn) (*proc, error) {
	p, err := f.launch(s)
	if err != nil {
		return nil, err
	}
	return p, p.receive(nil)
}

// startAll starts n alike and waits for all of them.
func (f *fleet) startAll(n int, s func(i int) spawn) ([]*proc, error) {
	procs := make([]*proc, n)
	for i := range procs {
		var err error
		if procs[i], err = f.launch(s(i)); err != nil {
			return nil, err
		}
	}
	for _, p := range procs {
		if err := p.receive(nil); err != nil {
			return nil, err
		}
	}
	return procs, nil
}

func (f *fleet) launch(s spawn) (*proc, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this binary: %w", err)
	}
	p := &proc{f: f, role: s.role, cmd: exec.Command(self), errs: &tail{}}
	p.cmd.Env = append(os.Environ(), roleEnv+"="+s.role)
	if s.procs > 0 {
		p.cmd.Env = append(p.cmd.Env, "GOMAXPROCS="+strconv.Itoa(s.procs))
	}
	p.cmd.Env = append(p.cmd.Env, s.env...)
	p.cmd.ExtraFiles = s.files
	p.cmd.Stderr = p.errs
	// A group of its own, so that Ctrl-C reaches only the parent, which then
	// ends the others; and an end with the parent, however that ends.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	p.in, p.out = json.NewEncoder(p.stdin), json.NewDecoder(stdout)
	if err := f.run(p); err != nil {
		return nil, err
	}
	return p, p.send(s.job) // not under the lock, which is taken to find out why it failed
}

// run starts the process, unless everything is being ended.
func (f *fleet) run(p *proc) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx.Err() != nil {
		return errInterrupted
	}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.role, err)
	}
	f.procs = append(f.procs, p)
	return nil
}

var errInterrupted = errors.New("interrupted")

// answer is the envelope of what a child says.
type answer struct {
	Error string          `json:"error,omitempty"`
	Data  json.RawMessage `json:"data,omitempty"`
}

// send gives the process its next command.
func (p *proc) send(command any) error {
	if err := p.in.Encode(command); err != nil {
		return p.lost(err)
	}
	return nil
}

// receive waits for its next answer.
func (p *proc) receive(into any) error {
	var a answer
	if err := p.out.Decode(&a); err != nil {
		return p.lost(err)
	}
	if a.Error != "" {
		err := fmt.Errorf("%s: %s", p.role, a.Error)
		if p.watched {
			return err
		}
		return cmp.Or(p.f.cause(), err)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(a.Data, into)
}

// mustNotSpeak watches a process that has nothing more to say: if it does, or
// ends, something went wrong, and everything is ended with that reason.
func (p *proc) mustNotSpeak() {
	p.watched = true
	go func() {
		err := p.receive(nil)
		if p.ending.Load() {
			return
		}
		if err == nil {
			err = fmt.Errorf("%s spoke out of turn", p.role)
		}
		p.f.fail(err)
	}()
}

// cause is why everything was ended, if it was or is about to be: a producer
// may complain of a missing broker before the death behind it is noticed.
func (f *fleet) cause() error {
	for range 50 {
		if err := f.failed(); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

func (p *proc) lost(err error) error {
	if p.f.ctx.Err() != nil {
		return errInterrupted
	}
	if err := p.f.failed(); err != nil {
		return err
	}
	if p.ending.Load() {
		return err
	}
	p.wait(time.Second)
	return fmt.Errorf("%s (process %d) ended unexpectedly: %w\n%s", p.role, p.cmd.Process.Pid, err, p.errs)
}

// wait reaps the process, and kills it if it takes longer than d.
func (p *proc) wait(d time.Duration) {
	p.waited.Do(func() {
		t := time.AfterFunc(d, func() { _ = p.cmd.Process.Kill() })
		defer t.Stop()
		_ = p.cmd.Wait()
		p.over = true
	})
}

func (p *proc) pid() int { return p.cmd.Process.Pid }

// tail keeps the end of what a process wrote to its standard error.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 4096

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - tailBytes; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.buf))
}
