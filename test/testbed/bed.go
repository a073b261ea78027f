// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
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

// Context is what New was given.
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
	// All are marked before the first one ends: a worker that complains of its
	// broker's end before we come to it is not why the run should fail.
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

// fail ends everything because of one process that went wrong.
func (b *Bed) fail(err error) {
	b.mu.Lock()
	if b.err == nil {
		b.err = err
	}
	b.mu.Unlock()
	b.kill()
}

// failed is why everything was ended, if it was.
func (b *Bed) failed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// cause is why everything was ended, if it was or is about to be: a producer
// may complain of a missing broker before the death behind it is noticed.
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

// Eventually calls f until it is content, for at most d, and returns its last
// complaint.
func Eventually(d time.Duration, f func() error) error {
	for end := time.Now().Add(d); ; time.Sleep(2 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}
