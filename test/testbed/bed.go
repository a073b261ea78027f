// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Bed is the processes of one rig, and a private folder for their sockets.
type Bed struct {
	Dir string

	ctx     context.Context
	stop    func() bool
	watched atomic.Bool // there are essential processes

	mu        sync.Mutex
	processes []*Process
	err       error // of an essential process
}

// New makes a bed whose processes are killed when ctx ends.
func New(ctx context.Context) (*Bed, error) {
	// The folder's name is short: a socket's path has room for 107 bytes.
	dir, err := os.MkdirTemp("", "rb")
	if err != nil {
		return nil, fmt.Errorf("make a folder for sockets: %w", err)
	}
	b := &Bed{Dir: dir, ctx: ctx}
	b.stop = context.AfterFunc(ctx, b.kill)
	return b, nil
}

// Path is a file in the bed's folder.
func (b *Bed) Path(name string) string { return filepath.Join(b.Dir, name) }

// Context is the context given to New.
func (b *Bed) Context() context.Context { return b.ctx }

// Close ends every process and removes the folder.
func (b *Bed) Close() {
	b.stop()
	b.mu.Lock()
	processes := slices.Clone(b.processes)
	b.mu.Unlock()
	b.End(processes...)
	_ = os.RemoveAll(b.Dir)
}

// End kills some processes and reaps them.
func (b *Bed) End(processes ...*Process) {
	// All are marked before the first ends: the complaint of a worker whose broker ended
	// first must not fail the run.
	for _, p := range processes {
		p.ending.Store(true)
	}
	for _, p := range processes {
		_ = p.cmd.Process.Kill()
	}
	for _, p := range processes {
		<-p.ended
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.processes = slices.DeleteFunc(b.processes, func(p *Process) bool { return slices.Contains(processes, p) })
}

// fail kills all processes because an essential process went wrong.
func (b *Bed) fail(err error) {
	b.mu.Lock()
	if b.err == nil {
		b.err = err
	}
	b.mu.Unlock()
	b.kill()
}

// failed is the error of fail, or nil.
func (b *Bed) failed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// cause waits up to half a second for an error of fail: a producer may complain of a
// missing broker before the bed has noticed the broker's death.
func (b *Bed) cause() error {
	for i := 0; i < 50 && b.watched.Load(); i++ {
		if err := b.failed(); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil
}

func (b *Bed) kill() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range b.processes {
		_ = p.cmd.Process.Kill()
	}
}

// Eventually calls f until it returns nil, for at most d, and returns its last error.
func Eventually(d time.Duration, f func() error) error {
	for end := time.Now().Add(d); ; time.Sleep(2 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// Freeze stops a process, and waits until all its threads stand still: on busy cores some run on for a while.
func Freeze(pid int, d time.Duration) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	return Eventually(d, func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, file := range threads {
			if text, _ := os.ReadFile(file); !strings.Contains(string(text), ") T ") {
				err = fmt.Errorf("not stopped: %s", text)
			}
		}
		return err
	})
}
