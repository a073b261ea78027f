// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/tensor"
)

// declaration is what a worker said about its model.
type declaration struct {
	name         string
	signature    tensor.Signature
	policy       policy.Policy
	maxBatchSize int
}

// private is a broker of our own, a process, with its workers.
type private struct {
	dir, socket string
	attachTime  time.Duration
	log         tail
	ended       chan struct{}
	process     *os.Process
}

// startBroker starts one with a configuration file.
func startBroker(o *Options, config string) (*private, error) {
	dir, err := os.MkdirTemp("", "rbtune") // short: a socket's path has room for 107 bytes
	if err != nil {
		return nil, err
	}
	b := &private{dir: dir, socket: filepath.Join(dir, "broker.sock"), attachTime: o.AttachTime, ended: make(chan struct{})}
	file := filepath.Join(dir, "ringbatch.toml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	cmd := exec.Command(o.Program[0], append(o.Program[1:], "broker", "--config", file, "--socket", b.socket, "--drain_time", "1s")...)
	cmd.Stdout, cmd.Stderr = &b.log, &b.log
	// A group of its own: Ctrl-C is for this process, which ends the broker. If
	// this process is killed, the kernel tells the broker to end.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // the kernel means the thread that started it
		defer close(b.ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	b.process = cmd.Process
	return b, nil
}

// stop ends the broker, which ends its workers first.
func (b *private) stop() {
	_ = b.process.Signal(syscall.SIGTERM)
	<-b.ended
	_ = os.RemoveAll(b.dir)
}

// tail keeps the end of what was written.
type tail struct {
	mu   sync.Mutex
	text []byte
}

const tailBytes = 8 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	t.text = t.text[max(0, len(t.text)-tailBytes):]
	return len(p), nil
}

// last is its last lines.
func (t *tail) last(n int) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(string(t.text)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// explain adds the broker's last words, which are the workers' too.
func (b *private) explain(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	if text := b.log.last(8); text != "" {
		return fmt.Errorf("%w\nthe last lines of the broker and its workers:\n%s", err, text)
	}
	return err
}

// deadLives is how often a command may end before it attaches until it counts as
// one that never will.
const deadLives = 2

// await asks until ok is content, the workers have died, or the time is over.
func (b *private) await(ctx context.Context, what string, ok func(*stats.Broker) bool) error {
	a := admin.New(b.socket)
	deadline := time.Now().Add(b.attachTime)
	for {
		s, err := a.Stats(ctx)
		if err == nil && ok(s) {
			return nil
		}
		if err == nil {
			for _, p := range s.Processes {
				if !p.Attached && p.FailedStarts >= deadLives {
					return b.explain(fmt.Errorf("the worker command ends before it attaches: %s (%s)", p.Command, p.LastEnd))
				}
			}
		}
		if time.Now().After(deadline) {
			return b.explain(fmt.Errorf("%s within %v: does the command attach to $RINGBATCH_SOCKET? --attach_time gives it longer", what, b.attachTime))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-b.ended:
			return b.explain(errors.New("the private broker ended"))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitWorker waits for the first worker of a model.
func (b *private) awaitWorker(ctx context.Context, model string) error {
	return b.await(ctx, "no worker attached", func(s *stats.Broker) bool {
		m := s.Model(model)
		return m != nil && len(m.Workers) > 0
	})
}

// scale runs so many instances, and returns when they have attached.
func (b *private) scale(ctx context.Context, model string, n int) error {
	ctx, cancel := context.WithTimeout(ctx, b.attachTime)
	defer cancel()
	return admin.New(b.socket).Scale(ctx, model, n, false)
}

// discover starts one instance of the command to learn what it serves.
func (r *Report) discover(ctx context.Context) error {
	o := r.options
	r.say(time.Now(), "starting the worker command")
	b, err := startBroker(o, workerTable("[[worker]]", o, 1))
	if err != nil {
		return err
	}
	defer b.stop()
	var found []admin.Model
	if err := b.await(ctx, "no worker attached", func(*stats.Broker) bool {
		models, err := admin.New(b.socket).Models(ctx)
		found = models
		return err == nil && len(models) > 0
	}); err != nil {
		return err
	}
	var names []string
	for _, m := range found {
		names = append(names, m.Name)
		if o.Model == m.Name || o.Model == "" && len(found) == 1 {
			settings, err := m.Policy.Resolve(m.Signature.Inputs)
			if err != nil {
				return err
			}
			r.Model = m.Name
			r.declared = declaration{m.Name, m.Signature, m.Policy, settings.MaxBatchSize}
			return nil
		}
	}
	return fmt.Errorf("the command serves %s: --model says which of them to tune", strings.Join(names, ", "))
}
