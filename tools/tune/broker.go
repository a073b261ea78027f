// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"bytes"
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
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/profile"
)

// declaration is the model as its worker declares it.
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
	log         progress.Tail
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
	cmd.Env = append(os.Environ(), mark())
	cmd.Stdout, cmd.Stderr = &b.log, &b.log
	// The broker has a separate process group: Ctrl-C reaches this process, which ends the broker. If this process is killed,
	// the kernel ends the broker.
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

// stop ends the broker, which ends its workers first; then the processes that these left behind.
func (b *private) stop() {
	const orphanPatience = 2 * time.Second
	_ = b.process.Signal(syscall.SIGTERM)
	<-b.ended
	endMarked(orphanPatience)
	_ = os.RemoveAll(b.dir)
}

// explain adds the last words of the broker and its workers.
func (b *private) explain(err error) error {
	if text := b.log.String(); text != "" && !errors.Is(err, context.Canceled) {
		lines := strings.Split(text, "\n")
		return fmt.Errorf("%w\nthe last lines of the broker and its workers:\n%s", err, strings.Join(lines[max(0, len(lines)-8):], "\n"))
	}
	return err
}

func endsTooSoon(p stats.Process) error {
	if p.LastEnd == "exit status 0" { // it may have put its worker into the background, out of reach
		return fmt.Errorf("the worker command must stay in the foreground until it is told to end: %s (%s)", p.Command, p.LastEnd)
	}
	return fmt.Errorf("the worker command ends before it attaches: %s (%s)", p.Command, p.LastEnd)
}

// await asks until ok is content, the workers have died, or the time is over; then missing names the reason.
func (b *private) await(ctx context.Context, missing func() string, ok func(*stats.Broker) bool) error {
	deadline := time.Now().Add(b.attachTime)
	for {
		s, err := admin.New(b.socket).Stats(ctx)
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
			return b.explain(fmt.Errorf("%s within %v: does the command attach to $RINGBATCH_SOCKET? --wait gives it longer",
				missing(), b.attachTime))
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

// ready waits until that many instances run and have attached. Some may have died and been started again.
func (b *private) ready(ctx context.Context, model string, instances int) error {
	missing := func() string { return fmt.Sprintf("not all of %d instances attached", instances) }
	return b.await(ctx, missing, func(s *stats.Broker) bool {
		attached := !slices.ContainsFunc(s.Processes, func(p stats.Process) bool { return !p.Attached })
		return len(s.Processes) == instances && attached && s.Model(model) != nil
	})
}

// scale runs that many instances, and returns the number of their workers: an instance may be several.
func (b *private) scale(ctx context.Context, model string, instances int) (workers int, err error) {
	wait, cancel := context.WithTimeout(ctx, b.attachTime)
	defer cancel()
	if err = admin.New(b.socket).Scale(wait, model, instances, false); err == nil {
		err = b.ready(ctx, model, instances)
	}
	if err != nil {
		return 0, err
	}
	workers, _, err = profile.Workers(ctx, admin.New(b.socket), model)
	return workers, err
}

// isolated counts the model's requests that ran again because their batch failed as a whole.
func (b *private) isolated(ctx context.Context, model string) uint64 {
	s, err := admin.New(b.socket).Stats(ctx)
	if err != nil || s.Model(model) == nil {
		return 0
	}
	return s.Model(model).Isolated
}

// discover starts the command to learn the model that it serves: the named one, which may be the last of several that a command
// loads, or the only one.
func (r *Report) discover(ctx context.Context) error {
	r.say("starting the worker command")
	o := r.options
	b, err := startBroker(o, encoded(map[string]any{"worker": o.worker(1)}))
	if err != nil {
		return err
	}
	defer b.stop()
	var names []string
	var found *admin.Model
	missing := func() string {
		if len(names) == 0 {
			return "no worker attached"
		}
		return fmt.Sprintf("the command serves %s, and no worker of --model %s attached", strings.Join(names, ", "), o.Model)
	}
	err = b.await(ctx, missing, func(*stats.Broker) bool {
		models, err := admin.New(b.socket).Models(ctx)
		names, found = nil, nil
		for i := range models {
			names = append(names, models[i].Name)
			if o.Model == models[i].Name || o.Model == "" && len(models) == 1 {
				found = &models[i]
			}
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
	if slots := found.Policy["slots"]; r.differs("slots", slots) && !r.keepsSlots() {
		r.Notes = append(r.Notes, fmt.Sprintf("the worker's ring of %s slots has no room for the requests of the largest setting: "+
			"a larger one was measured, and the configuration says nothing of slots", slots))
	}
	return nil
}

// keepsSlots reports whether the ring that the worker declares has room for the requests of the largest setting.
func (r *Report) keepsSlots() bool {
	const spareSlots = 64 // for clients that go while the next ones come
	slots, _ := strconv.Atoi(r.declared.policy["slots"])
	return slots >= mostInFlight*slices.Max(r.options.Instances)*slices.Max(r.sizes())+spareSlots
}

// mark is in the environment of every process that tune starts, and of the processes that those start: a worker command may move
// to the background or start a new session.
func mark() string { return fmt.Sprintf("RINGBATCH_TUNE=%d", os.Getpid()) }

// KillAll kills every process that was started, at once.
func KillAll() { endMarked(0) }

const (
	orphanPoll = 5 * time.Millisecond
	killTime   = 10 * time.Second // for killed processes to end; a process that is stuck in the kernel does not
)

// endMarked ends every marked process by SIGTERM, and by SIGKILL after the patience. It returns when they have ended.
func endMarked(patience time.Duration) {
	begin := time.Now()
	asked := map[int]bool{}
	for time.Since(begin) < patience+killTime {
		running := markedProcesses()
		if len(running) == 0 {
			return
		}
		for _, pid := range running {
			if time.Since(begin) >= patience {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			} else if !asked[pid] {
				_ = syscall.Kill(pid, syscall.SIGTERM)
				asked[pid] = true
			}
		}
		time.Sleep(orphanPoll)
	}
}

// markedProcesses lists the processes that still run. (The environment of a zombie is empty.)
func markedProcesses() (running []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	want := []byte(mark())
	for _, file := range files {
		environ, _ := os.ReadFile(file)
		for _, variable := range bytes.Split(environ, []byte{0}) {
			if bytes.Equal(variable, want) {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
				running = append(running, pid)
			}
		}
	}
	return running
}
