package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/stats"
)

// patience is how long anything may take here before it counts as stuck.
const patience = 30 * time.Second

// host is a broker process with what belongs to it.
type host struct {
	t      *testing.T
	dir    string
	role   role // the broker's
	broker *proc
	before usage // of the broker, when nobody is attached
	mine   usage // of this process, before the test
}

// theModel is what most tests use: declared by configuration, so that it
// stays when everybody leaves.
var theModel = modelSpec{Name: "m", Slots: 64, MaxBatch: 8, WaitMS: 1, LeaseMS: 20_000}

// newHost starts a broker and, when the test ends, checks that nothing is
// left behind in it.
func newHost(t *testing.T, models ...modelSpec) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "rb")
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, dir: dir, mine: usageOf(t, os.Getpid())}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	h.role = role{Kind: "broker", Socket: filepath.Join(dir, "b.sock"), Models: models}
	h.startBroker()
	return h
}

func (h *host) startBroker() {
	h.t.Helper()
	h.broker = start(h.t, h.role)
	h.broker.expect("listening")
	h.before = usageOf(h.t, h.broker.pid())
}

// worker starts a worker and waits until the broker has it.
func (h *host) worker(m modelSpec) *proc { return h.workerThat("", m) }

// workerThat starts a worker with a habit; one that works "patiently" stops
// in the middle of a slow request until it gets SIGUSR1.
func (h *host) workerThat(do string, m modelSpec) *proc {
	h.t.Helper()
	p := start(h.t, role{Kind: "worker", Socket: h.role.Socket, Model: m, Do: do})
	h.eventually("worker attached", func() error {
		for _, w := range h.model(m.Name).Workers {
			if w.Pid == p.pid() {
				return nil
			}
		}
		return fmt.Errorf("worker %d is not there", p.pid())
	})
	return p
}

func (h *host) client(do string) *proc {
	return start(h.t, role{Kind: "client", Socket: h.role.Socket, Model: modelSpec{Name: "m"}, Do: do})
}

// dial attaches this process as a client; the caller closes it.
func (h *host) dial(opts ...client.Option) *client.Client {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := client.Dial(ctx, "m", append([]client.Option{client.WithSocket(h.role.Socket), client.WaitForModel()}, opts...)...)
	if err != nil {
		h.t.Fatal(err)
	}
	return c
}

func (h *host) stats() *stats.Broker {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := admin.New(h.role.Socket).Stats(ctx)
	if err != nil {
		h.t.Fatalf("stats: %v", err)
	}
	return s
}

// model is the statistics of one model, zero if the broker has none of that
// name.
func (h *host) model(name string) stats.Model {
	h.t.Helper()
	if m := h.stats().Model(name); m != nil {
		return *m
	}
	return stats.Model{}
}

// eventually waits until f is content.
func (h *host) eventually(what string, f func() error) {
	h.t.Helper()
	eventually(h.t, what, f)
}

func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	end := time.Now().Add(patience)
	for {
		err := f()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// wait waits for goroutines that send requests; if one never ends, it tells
// what the broker thinks.
func (h *host) wait(wg *sync.WaitGroup) {
	h.t.Helper()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		text, _ := json.MarshalIndent(h.stats(), "", " ")
		h.t.Fatalf("requests have no end; the broker says\n%s", text)
	}
}

// settled waits until the broker has no client, and checks that every slot is
// back, every accepted request was ended once, and that the broker holds no
// descriptor, mapping or thread more than before anybody came. Workers that
// are still attached are accounted for.
func (h *host) settled() {
	h.t.Helper()
	h.eventually("everything is given back", func() error {
		workers := 0
		for _, m := range h.stats().Models {
			ended := uint64(0)
			for _, n := range m.Ended {
				ended += n
			}
			workers += len(m.Workers)
			if m.Clients != 0 || m.SlotsFree != m.Slots || m.QueueLength != 0 || m.Requests != ended {
				return fmt.Errorf("%s: %d clients, %d of %d slots free, %d queued, %d requests of which ended %v",
					m.Name, m.Clients, m.SlotsFree, m.Slots, m.QueueLength, m.Requests, m.Ended)
			}
		}
		// A worker: connection, pidfd, doorbell; and its session.
		want := h.before
		want.fds += 3 * workers
		want.maps += workers
		return usageOf(h.t, h.broker.pid()).within(want)
	})
	h.eventually("this process has nothing left", func() error { return usageOf(h.t, os.Getpid()).within(h.mine) })
}

// stop ends the broker by SIGTERM and expects a clean drain.
func (h *host) stop() {
	h.t.Helper()
	h.broker.signal(syscall.SIGTERM)
	h.broker.expect("drained")
	if err := h.broker.wait(); err != nil {
		h.t.Errorf("broker: %v", err)
	}
	for _, name := range []string{h.role.Socket} {
		if _, err := os.Lstat(name); !os.IsNotExist(err) {
			h.t.Errorf("%s is still there: %v", name, err)
		}
	}
}

// proc is a child process.
type proc struct {
	t     *testing.T
	what  string
	cmd   *exec.Cmd
	lines chan string
	done  chan struct{}
	err   error
	log   lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start runs this binary in a role. It is killed when the test ends, and its
// log is shown if the test failed.
func start(t *testing.T, r role, change ...func(*exec.Cmd)) *proc {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	p := &proc{t: t, what: strings.TrimSpace(r.Kind + " " + r.Do), lines: make(chan string, 1024), done: make(chan struct{})}
	p.cmd = exec.Command(os.Args[0])
	p.cmd.Env = append(os.Environ(), roleEnv+"="+string(text), "GORACE=atexit_sleep_ms=0") // -race: leave at once
	p.cmd.Stderr = &p.log
	p.cmd.WaitDelay = time.Second
	for _, f := range change {
		f(p.cmd)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for sc := bufio.NewScanner(out); sc.Scan(); {
			p.lines <- sc.Text()
		}
		close(p.lines)
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("--- %s (pid %d):\n%s", p.what, p.pid(), p.log.String())
		}
	})
	return p
}

func (p *proc) pid() int { return p.cmd.Process.Pid }

func (p *proc) signal(s os.Signal) { _ = p.cmd.Process.Signal(s) }

// kill ends the process and waits for its end.
func (p *proc) kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// wait waits for its end.
func (p *proc) wait() error {
	p.t.Helper()
	select {
	case <-p.done:
		return p.err
	case <-time.After(patience):
		p.t.Fatalf("%s (pid %d) does not end", p.what, p.pid())
		return nil
	}
}

// expect waits for a line that begins with text, and returns the rest of it.
func (p *proc) expect(text string) string {
	p.t.Helper()
	end := time.After(patience)
	for {
		select {
		case line, ok := <-p.lines:
			if !ok {
				p.t.Fatalf("%s (pid %d) ended before it said %q\n%s", p.what, p.pid(), text, p.log.String())
			}
			if rest, ok := strings.CutPrefix(line, text); ok {
				return strings.TrimSpace(rest)
			}
			if strings.HasPrefix(line, "error: ") {
				p.t.Fatalf("%s (pid %d) said %q, not %q", p.what, p.pid(), line, text)
			}
		case <-end:
			p.t.Fatalf("%s (pid %d) never said %q\n%s", p.what, p.pid(), text, p.log.String())
		}
	}
}

// tryDial dials once.
func (h *host) tryDial(opts ...client.Option) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return client.Dial(ctx, "m", append([]client.Option{client.WithSocket(h.role.Socket)}, opts...)...)
}

// queued waits until that many requests wait in the broker's queue.
func (h *host) queued(n int) {
	h.t.Helper()
	h.eventually("the queue's length", func() error {
		if got := h.model("m").QueueLength; got != n {
			return fmt.Errorf("%d queued, not %d", got, n)
		}
		return nil
	})
}
