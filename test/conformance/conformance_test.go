// SPDX-License-Identifier: Apache-2.0

// Package conformance runs the same behaviours against the Go and the C client
// and worker: scripts in testdata, each with every pair of them.
//
// A line of a script is a peer, a command and the expected result:
//
//	c1 claim r0 1 0 = OK
//
// Names of clients begin with c, names of workers with w; each peer is a process.
//
//	kill w1                  ends a peer with SIGKILL
//	stop broker              and start broker
//	alias m m@2              points an alias at another model
//	ended 3                  waits until the broker has ended at least 3 requests
//	go c1 …                  does not wait for the result, which answer c1 = … reads
//	thief MODEL              steals wake-ups (hostile_unsafe_test.go)
//	damage MODEL STATUS      ends requests as a broken worker could
//	lie MODEL ATTEMPTS STEPS shows impossible progress, of an attempt so much later
//	flicker MODEL            shows other progress all the time, of requests that have not begun
//	mail ROWS SIZE SIZE …    posts mail as a broken broker could, to the worker that attached last:
//	                         sizes of the batch's dimension, then of each request of so many rows
//
// A line that begins with # is a comment.
//
// RINGBATCH_GO_DRIVER and RINGBATCH_C_DRIVER name other drivers, of another commit (test/compat) or another machine.
package conformance

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
)

const driverEnv = "RB_CONFORMANCE_DRIVER"

// The programs that play peers: this test, and the built testdata/driver.c.
var goDriver, cDriver = os.Args[0], os.Getenv("RINGBATCH_C_DRIVER")

func TestMain(m *testing.M) {
	if os.Getenv(driverEnv) != "" {
		drive()
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if other := os.Getenv("RINGBATCH_GO_DRIVER"); other != "" {
		goDriver = other
	}
	if cDriver != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "conformance")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	cDriver = filepath.Join(dir, "driver")
	sources, _ := filepath.Glob("../../cbindings/src/*.c")
	args := append([]string{"-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
		"-DRB_LINK_MASK=3", "-I../../cbindings", "-pthread", "-o", cDriver, "testdata/driver.c"}, sources...)
	if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "cc: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// peer is a driver process.
type peer struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan string
}

func start(t *testing.T, language, socket string) *peer {
	t.Helper()
	p := &peer{cmd: exec.Command(goDriver), lines: make(chan string, 100)}
	if language == "C" {
		p.cmd = exec.Command(cDriver)
	}
	p.cmd.Env = append(os.Environ(), driverEnv+"=1", "RINGBATCH_SOCKET="+socket)
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	must.Do(t, err)
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	must.Do(t, p.cmd.Start())
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	t.Cleanup(func() { p.in.Close(); _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
	return p
}

// do runs a command and compares its result.
func (p *peer) do(t *testing.T, command, want string) {
	t.Helper()
	fmt.Fprintln(p.in, command)
	if got := p.answer(); !matches(got, want) {
		t.Fatalf("%s: %s, not %s", command, got, want)
	}
}

func (p *peer) answer() string {
	select {
	case line, ok := <-p.lines:
		if !ok {
			return "(ended)"
		}
		return line
	case <-time.After(60 * time.Second):
		return "(no answer)"
	}
}

func TestBothClientsAndWorkersBehaveAlike(t *testing.T) {
	scripts, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, clients := range []string{"Go", "C"} {
		for _, workers := range []string{"Go", "C"} {
			for _, script := range scripts {
				title := strings.TrimSuffix(filepath.Base(script), ".txt")
				t.Run(clients+" client, "+workers+" worker/"+title, func(t *testing.T) {
					t.Parallel() // scripts wait more than they compute
					play(t, script, clients, workers)
				})
			}
		}
	}
}

func play(t *testing.T, script, clients, workers string) {
	text, err := os.ReadFile(script)
	must.Do(t, err)
	var mem sessions
	cfg := broker.Config{OpenFolder: true, DrainTime: 100 * time.Millisecond}
	if strings.HasPrefix(string(text), sleepers) {
		cfg.Models = []broker.ModelConfig{sleeper(t, "broken", "false"), sleeper(t, "slow", "sleep", "1000")}
	}
	b := testbed.StartWith(t, cfg, mem.Create)
	peers := map[string]*peer{}
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		command, want, judged := strings.Cut(line, " = ")
		who, what, _ := strings.Cut(command, " ")
		waits := true
		switch {
		case command == "stop broker":
			_ = b.Stop()
			continue
		case command == "start broker":
			must.Do(t, b.Start())
			continue
		case who == "alias":
			fields := strings.Fields(what)
			a, err := alias.Parse(fields[0], fields[1:]...)
			if err == nil {
				err = admin.New(b.Socket()).SetAlias(t.Context(), a, false)
			}
			must.Do(t, err)
			continue
		case who == "ended":
			must.Do(t, testbed.Eventually(time.Minute, func() error { return ended(t, b.Socket(), what) }))
			continue
		case who == "kill":
			_ = peers[what].cmd.Process.Kill()
			_, _ = peers[what].cmd.Process.Wait()
			continue
		case who == "mail":
			mem.post(t, what)
			continue
		case hostile(t, b.Socket(), who, what):
			continue
		case who == "go":
			waits = false
			who, what, _ = strings.Cut(what, " ")
		case who == "answer":
			who, what = what, ""
		}
		p := peers[who]
		if p == nil {
			language := clients
			if strings.HasPrefix(who, "w") {
				language = workers
			}
			p = start(t, language, b.Socket())
			peers[who] = p
		}
		if what != "" {
			fmt.Fprintln(p.in, what)
		}
		if !waits {
			continue
		}
		if got := p.answer(); judged && !matches(got, want) {
			t.Fatalf("%s:%d: %s\n  is  %s\n  not %s", script, i+1, command, got, want)
		}
	}
}

// sleepers begins a script whose broker has models that sleep. Their workers never attach.
const sleepers = "# broken and slow sleep:"

func sleeper(t *testing.T, name string, command ...string) broker.ModelConfig {
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	must.Do(t, err)
	return broker.ModelConfig{Name: name, Signature: sig, Policy: policy.New(policy.Slots(64)), Idle: time.Hour,
		Workers: []supervise.Worker{{Command: command, Most: 1}}}
}

// ended returns nil once the broker has ended at least as many requests as want says.
func ended(t *testing.T, socket, want string) error {
	all, err := admin.New(socket).Stats(t.Context())
	if err != nil {
		return err
	}
	n := uint64(0)
	for i := range all.Models {
		for _, count := range all.Models[i].Ended {
			n += count
		}
	}
	if least, err := strconv.ParseUint(want, 10, 64); err != nil || n < least {
		return fmt.Errorf("%d requests have ended, not %s", n, want)
	}
	return nil
}

// matches accepts "A or B", and "A…" for a prefix.
func matches(got, want string) bool {
	for _, one := range strings.Split(want, " or ") {
		if start, open := strings.CutSuffix(one, "…"); got == one || open && strings.HasPrefix(got, start) {
			return true
		}
	}
	return false
}
