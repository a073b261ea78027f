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
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/profile"
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
	dir, socket, file string
	attachTime        time.Duration
	began             time.Time
	starting          time.Duration // what the instances took to come up together
	// general is the file for so many instances, where they belong to no model in it.
	general func(instances int) string
	log     tail
	ended   chan struct{}
	process *os.Process
}

// startBroker starts one with a configuration file.
func startBroker(o *Options, config string) (*private, error) {
	dir, err := os.MkdirTemp("", "rbtune") // short: a socket's path has room for 107 bytes
	if err != nil {
		return nil, err
	}
	b := &private{dir: dir, socket: filepath.Join(dir, "broker.sock"), file: filepath.Join(dir, "ringbatch.toml"), attachTime: o.AttachTime, began: time.Now(), ended: make(chan struct{})}
	if err := os.WriteFile(b.file, []byte(config), 0o600); err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	cmd := exec.Command(o.Program[0], append(o.Program[1:], "broker", "--config", b.file, "--socket", b.socket, "--drain_time", "1s")...)
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

// stop ends the broker, which ends its workers first; then what these left behind.
func (b *private) stop() {
	_ = b.process.Signal(syscall.SIGTERM)
	<-b.ended
	endDescendants(orphanPatience)
	_ = os.RemoveAll(b.dir)
}

// orphanPatience is for workers that the broker does not know as its own.
const orphanPatience = 2 * time.Second

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

// errBackground is a command that ends well before its worker attaches, or after it has
// put its worker into the background, where nobody knows whose it is.
var errBackground = errors.New("the worker command must stay in the foreground until it is told to end")

func endsTooSoon(p stats.Process) error {
	if p.LastEnd == "exit status 0" {
		return fmt.Errorf("%w: %s (%s)", errBackground, p.Command, p.LastEnd)
	}
	return fmt.Errorf("the worker command ends before it attaches: %s (%s)", p.Command, p.LastEnd)
}

// await asks until ok is content, the workers have died, or the time is over; then
// missing says what is not there.
func (b *private) await(ctx context.Context, missing func() string, ok func(*stats.Broker) bool) error {
	a := admin.New(b.socket)
	deadline := time.Now().Add(b.attachTime)
	for {
		s, err := a.Stats(ctx)
		if err == nil && ok(s) {
			return nil
		}
		if err == nil {
			for _, p := range s.Processes {
				if !p.Attached && p.FailedStarts >= profile.DeadLives {
					return b.explain(endsTooSoon(p))
				}
			}
		}
		if time.Now().After(deadline) {
			return b.explain(fmt.Errorf("%s within %v: does the command attach to $RINGBATCH_SOCKET? --attach_time gives it longer", missing(), b.attachTime))
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

// up waits until so many instances, and no more, run and have attached.
func (b *private) up(ctx context.Context, instances int) error {
	missing := func() string { return fmt.Sprintf("not all of %d instances attached", instances) }
	err := b.await(ctx, missing, func(s *stats.Broker) bool {
		return len(s.Processes) == instances && !slices.ContainsFunc(s.Processes, func(p stats.Process) bool { return !p.Attached })
	})
	if b.starting == 0 {
		b.starting = time.Since(b.began)
	}
	return err
}

// ready waits until the model has so many workers, some of which may have died and
// been started again.
func (b *private) ready(ctx context.Context, model string, workers int) error {
	missing := func() string { return fmt.Sprintf("not all of %d workers came back", workers) }
	return b.await(ctx, missing, func(*stats.Broker) bool {
		n, _, err := profile.Workers(ctx, admin.New(b.socket), model)
		return err == nil && n >= workers
	})
}

// restarts is how often a worker process ended by itself.
func (b *private) restarts(ctx context.Context) (n int) {
	s, err := admin.New(b.socket).Stats(ctx)
	if err != nil {
		return 0
	}
	for _, p := range s.Processes {
		n += int(p.Restarts)
		if p.State == "waiting" { // to be started again
			n++
		}
	}
	return n
}

// scale runs so many instances, and returns when they have attached.
func (b *private) scale(ctx context.Context, model string, n int) error {
	if b.general != nil {
		if err := os.WriteFile(b.file, []byte(b.general(n)), 0o600); err != nil {
			return err
		}
		if err := b.process.Signal(syscall.SIGHUP); err != nil {
			return err
		}
		return b.up(ctx, n)
	}
	ctx, cancel := context.WithTimeout(ctx, b.attachTime)
	defer cancel()
	return admin.New(b.socket).Scale(ctx, model, n, false)
}

// discover starts the command to learn what it serves. The broker comes back,
// with all the instances, if it can be measured with; otherwise it has ended.
func (r *Report) discover(ctx context.Context, begin time.Time) (*private, error) {
	r.say(begin, "starting the worker command")
	general := func(instances int) string { return workerTable("[[worker]]", r.options, instances) }
	b, err := startBroker(r.options, general(r.most()))
	if err != nil {
		return nil, err
	}
	b.general = general
	if err = r.declare(ctx, b, begin); err == nil && r.asDeclared() {
		if err = admin.New(b.socket).Set(ctx, r.Model, policy.Policy{"wait_time": "auto", "latency_goal": "0", "preferred_batch_sizes": ""}); err == nil {
			return b, nil
		}
	}
	b.stop()
	return nil, err
}

// asDeclared tells that every setting can be tried on the model that the workers made by
// themselves, since it is the one that the configuration would make, but for what can be
// changed while it runs.
func (r *Report) asDeclared() bool {
	return r.maxSize() <= r.declared.maxBatchSize && r.keepsSlots(r.maxSize())
}

// keepsSlots tells that the ring is as large as the worker has it: that there is room for
// what is in flight with as many instances, and batches as large.
func (r *Report) keepsSlots(maxBatchSize int) bool {
	slots, _ := strconv.Atoi(r.declared.policy["slots"])
	return slots >= mostInFlight*r.most()*maxBatchSize+spareSlots
}

// spareSlots are for clients that go while the next ones come.
const spareSlots = 64

// declare waits until the workers have said what they serve: the model that was
// named, which may be the last of several that a command loads, or any.
func (r *Report) declare(ctx context.Context, b *private, begin time.Time) error {
	o := r.options
	var names, said []string
	var found *admin.Model
	missing := func() string {
		if len(names) == 0 {
			return "no worker attached"
		}
		return fmt.Sprintf("the command serves %s, and no worker of --model %s attached", strings.Join(names, ", "), o.Model)
	}
	err := b.await(ctx, missing, func(*stats.Broker) bool {
		models, err := admin.New(b.socket).Models(ctx)
		names, found = nil, nil
		for i := range models {
			names = append(names, models[i].Name)
			if o.Model == models[i].Name || o.Model == "" && len(models) == 1 {
				found = &models[i]
			}
		}
		if found == nil && o.Model != "" && !slices.Equal(names, said) { // the name may be wrong, or its worker is still loading
			r.say(begin, "%s yet; waiting for it up to --attach_time %v", missing(), b.attachTime)
			said = names
		}
		return err == nil && (found != nil || o.Model == "" && len(names) > 0)
	})
	if err != nil {
		return err
	}
	if found == nil {
		return fmt.Errorf("the command serves %s: --model says which of them to tune", strings.Join(names, ", "))
	}
	settings, err := found.Policy.Resolve(found.Signature.Inputs)
	if err != nil {
		return err
	}
	r.Model = found.Name
	r.declared = declaration{found.Name, found.Signature, found.Policy, settings.MaxBatchSize}
	if slots := found.Policy["slots"]; r.differs("slots", slots) && !r.keepsSlots(r.maxSize()) {
		r.Notes = append(r.Notes, fmt.Sprintf("the worker's ring of %s slots has no room for as many requests as %d instances with batches of %d take: it was measured with one that has, and the configuration says nothing of slots", slots, r.most(), r.maxSize()))
	}
	return nil
}
