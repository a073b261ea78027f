// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// commandEnv makes the test binary be the command: nothing needs to be built.
const commandEnv = "RINGBATCH_TEST_COMMAND"

func TestMain(m *testing.M) {
	switch os.Getenv(commandEnv) {
	case "":
	default:
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// cli runs the command, with a private broker.
type cli struct {
	t      *testing.T
	bin    string
	bed    *testbed.Bed
	config string
	broker *testbed.Process
}

const firstConfig = `
[[model]]
name = "affine"
inputs = ["x:f32[4]"]
outputs = ["y:f32[4]"]
max_batch_size = 32
slots = 32
wait_time = "5ms"
`

func startCLI(t *testing.T) *cli { return startCLIWith(t, firstConfig) }

func startCLIWith(t *testing.T, config string) *cli {
	bed, err := testbed.New(context.Background())
	must.Do(t, err)
	t.Cleanup(bed.Close)
	c := &cli{t: t, bin: os.Args[0], bed: bed, config: bed.Path("ringbatch.toml")}
	t.Setenv(commandEnv, "1")
	t.Setenv("RINGBATCH_SOCKET", bed.Path("private/b.sock"))
	c.write(config)
	c.broker = c.start("broker", "--config", c.config, "--log-level", "warn")
	t.Cleanup(func() { c.ends(c.broker) })
	c.until("the broker answers", func() bool { _, code := c.run("stats"); return code == 0 })
	return c
}

// start runs the command beside the test; it does not outlive it.
func (c *cli) start(args ...string) *testbed.Process {
	c.t.Helper()
	p, err := c.bed.Start(testbed.Spec{Command: append([]string{c.bin}, args...)})
	must.Do(c.t, err)
	return p
}

// ends stops a broker or a worker and expects a clean end.
func (c *cli) ends(p *testbed.Process) {
	if err := p.Stop(patience); err != nil {
		c.t.Errorf("%s: %v\n%s", p, err, p.Log())
	}
}

func (c *cli) write(config string) {
	must.Do(c.t, os.WriteFile(c.config, []byte(config), 0o600))
}

// run returns the output of the command and its exit status.
func (c *cli) run(args ...string) (string, int) {
	cmd := exec.Command(c.bin, args...)
	out, _ := cmd.CombinedOutput()
	return string(out), cmd.ProcessState.ExitCode()
}

func (c *cli) stats() stats.Broker { return c.statsOf("") }

// statsOf are the statistics of a broker at another socket.
func (c *cli) statsOf(socket string) stats.Broker {
	out, _ := c.run("stats", "--json", "--socket", socket)
	var s stats.Broker
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		c.t.Fatalf("stats --json: %v\n%s", err, out)
	}
	return s
}

func (c *cli) until(what string, ok func() bool) {
	c.t.Helper()
	if waitFor(ok) != nil {
		c.t.Fatalf("never: %s", what)
	}
}

// patience bounds every wait for an expected event; a machine may stand still for seconds.
const patience = 2 * time.Minute

func waitFor(ok func() bool) error {
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if ok() {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("never")
		}
	}
}

func TestThePolicyChangesWhileTheModelRuns(t *testing.T) {
	c := startCLI(t)
	out, code := c.run("set", "affine", "wait_time=3ms", "max_batch_size=16", "max_queue=100", "lease=30s")
	if code != 0 || out != "lease: 30s (as before)\nmax_batch_size: 32 -> 16\nmax_queue.0: 0 -> 100\nwait_time: 5ms -> 3ms\n" {
		t.Fatalf("set: %d\n%s", code, out)
	}
	if m := c.stats().Models[0]; m.WaitTimeMS != 3 || m.MaxBatchSize != 16 {
		t.Errorf("after set: wait %v ms, batch %d", m.WaitTimeMS, m.MaxBatchSize)
	}
	for _, bad := range []string{"max_batch_size=64", "wait_time=soon", "wait_time=nan", "speed=fast", "preferred_batch_sizes=8,4",
		"max_queue.3=1"} {
		key, _, _ := strings.Cut(bad, "=")
		out, code := c.run("set", "affine", "lease=9s", bad)
		if code != 1 || !strings.Contains(out, key) || strings.Contains(out, "invalid") {
			t.Errorf("set %s: status %d\n%s", bad, code, out)
		}
		if models, err := admin.New("").Models(t.Context()); err != nil || models[0].Policy["lease"] != "30s" ||
			models[0].Policy["wait_time"] != "3ms" {
			t.Fatalf("a refused set changed something: %v, %v", models, err)
		}
	}
	if out, code := c.run("set", "affine", "idle=3s"); code != 2 || !strings.Contains(out, "idle is a key of the configuration file") {
		t.Errorf("set idle: status %d\n%s", code, out)
	}
	if _, code := c.run("set", "nobody", "wait_time=1ms"); code != 1 {
		t.Error("set of an unknown model was taken")
	}

	c.write(strings.Replace(firstConfig, "5ms", "7ms", 1) + "[[model]]\nname = \"second\"\ninputs = [\"x:u8[1]\"]\noutputs = " +
		"[\"y:u8[1]\"]\n")
	c.broker.Signal(syscall.SIGHUP)
	c.until("the reloaded configuration is in force", func() bool {
		return c.stats().Models[0].WaitTimeMS == 7 &&
			len(c.stats().Models) == 2
	})

	// Refused whole: the third model is fine, the change of the first is not.
	c.write(strings.Replace(firstConfig, "max_batch_size = 32\nslots = 32", "max_batch_size = 64",
		1) + "[[model]]\nname = \"third\"\ninputs = [\"x:u8[1]\"]\noutputs = [\"y:u8[1]\"]\n")
	c.broker.Signal(syscall.SIGHUP)
	c.until("the broker has refused it", func() bool { return strings.Contains(c.broker.Log(), "configuration refused") })
	if s := c.stats(); len(s.Models) != 2 || s.Models[0].WaitTimeMS != 7 {
		t.Errorf("a refused configuration changed something: %+v", s.Models)
	}
}

func TestEveryMistakeOnTheCommandLineHasItsStatusAndSaysWhatToDo(t *testing.T) {
	c := startCLI(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must.Do(t, err)
	defer l.Close()
	_, taken, _ := net.SplitHostPort(l.Addr().String())
	for _, m := range []struct {
		args []string
		code int
		says string
	}{
		{nil, 2, "Usage"},
		{[]string{"fly"}, 2, "no command"},
		{[]string{"brocker"}, 2, "did you mean broker?"},
		{[]string{"nosuch"}, 2, "no command \"nosuch\"; see"},
		{[]string{"manuall"}, 2, "no command \"manuall\"; see"},
		{[]string{"help", "broker"}, 0, "Examples"},
		{[]string{"help", "broker", "x"}, 2, "help is for one command"},
		{[]string{"broker", "--speed"}, 2, "--help"},
		{[]string{"broker", "--lease", "5s"}, 2, "needs --model"},
		{[]string{"broker", "--max-queue", "5"}, 2, "needs --model"},
		{[]string{"broker", "--preferred-batch-sizes", "4"}, 2, "needs --model"},
		{[]string{"broker", "--model", "m", "--input", "x:f32[1]", "--output", "y:f32[1]", "--max-batch-size", "0"}, 2,
			"max_batch_size=0: must be a number, 1.."},
		{[]string{"broker", "--model", "m", "--input", "x:f32[1]", "--output", "y:f32[1]", "--wait-time", "nan"}, 2, "out of range"},
		{[]string{"worker"}, 2, "say which built-in model to serve: affine, echo"},
		{[]string{"worker", "telepathy"}, 1, "echo"},
		{[]string{"worker", "ecko"}, 1, "did you mean echo?"},
		{[]string{"gateway", "--http", "99999"}, 2, "--http 99999: want a port, HOST:PORT or off"},
		{[]string{"worker", "echo", "--scale", "2"}, 2, "--scale is for affine"},
		{[]string{"worker", "affine", "--weights", "w.bin"}, 2, "--weights is for mlp and --ptx"},
		{[]string{"infer", "affine", "1", "2", "3", "4", "--out", "z=z.npy"}, 1, "no output"},
		{[]string{"infer", "affine", "1", "2", "3", "4", "--out", "y=/no/such/y.npy"}, 1, "cannot be written"},
		{[]string{"trace", "affine", "--out", "/no/such/trace.json"}, 1, "cannot be written"},
		{[]string{"gateway", "--window", "x"}, 2, "--window x: not a whole number"},
		{[]string{"infer"}, 2, "infer needs a MODEL\n  Usage: ringbatch infer [flags] MODEL [NUMBER…|TEXT…]\n"},
		{[]string{"stats", "a", "b"}, 2, `stats does not take the argument "b"`},
		{[]string{"broker", "--max-batch-sz", "3"}, 2, "no flag --max-batch-sz (did you mean --max-batch-size?); see ringbatch broker "},
		{[]string{"broker", "--max_batch_size", "3"}, 2, "no flag --max_batch_size (did you mean --max-batch-size?)"},
		{[]string{"bench", "affine", "--rate", "abc"}, 2, "ringbatch: --rate abc: not a number; see ringbatch bench --help\n"},
		{[]string{"bench", "affine", "--clients", "x"}, 2, "--clients x: not a whole number"},
		{[]string{"bench", "affine", "--duration", "soon"}, 2, "--duration soon: not a duration: write 5ms, 1.5s, or seconds as a number"},
		{[]string{"bench", "affine", "--duration", "0.1"}, 2, "--duration is 0.1, must be 0.3..86400"},
		{[]string{"dashboard", "--http", "99999"}, 2, "--http 99999: not a port, 0..65535"},
		{[]string{"dashboard", "--http", taken}, 1, "ringbatch: port " + taken + " is taken; choose another with --http PORT\n"},
		{[]string{"gateway", "--http", taken, "--grpc", "off"}, 1, "port " + taken + " is taken; choose another with --http PORT\n"},
		{[]string{"demo", "--http", taken}, 1, "ringbatch: port " + taken + " is taken; choose another with --http PORT\n"},
		{[]string{"serve"}, 2, "serve needs a TARGET"},
		{[]string{"torch", "--half"}, 2, "torch needs a TARGET"},
		{[]string{"serve", "nowhere.pt"}, 1, "ringbatch: nowhere.pt: there is no such file\n"},
		{[]string{"onnx", "--name", "m", "nowhere.onnx"}, 1, "nowhere.onnx: there is no such file"},
		{[]string{"serve", "model.gguf"}, 1, "model.gguf: want a file that ends in .pt, .pt2, "},
		{[]string{"serve", "cli_test.go"}, 1, "cli_test.go: want a file that ends in .pt, "},
		{[]string{"serve", "package.module:name", "--http", taken}, 1, "port " + taken + " is taken; choose another with --http PORT"},
		{[]string{"serve", "package.module:name", "--grpc=127.0.0.1:" + taken}, 1, "choose another with --grpc PORT"},
		{[]string{"infer", "affine", "--in", "z=nofile.npy"}, 1, `ringbatch: no input "z"; the model is x:f32[4]`},
		{[]string{"infer", "afine", "1"}, 1, "(did you mean affine?)"},
		{[]string{"stats", "afine"}, 1, "(did you mean affine?); ringbatch models lists them"},
		{[]string{"ready", "afine"}, 1, "(did you mean affine?)"},
		{[]string{"bench", "afine"}, 1, "(did you mean affine?)"},
		{[]string{"alias"}, 0, "no aliases\n"},
		{[]string{"set", "affine", "wait_time=abc"}, 1, "ringbatch: wait_time=abc: \"abc\" is not a duration"},
		{[]string{"set", "affine", "wait_time=3"}, 0, "wait_time: 5ms -> 3s\nwarning: requests may wait 3s for a batch to fill"},
		{[]string{"stats"}, 0, "wait_time 3s;"},
		{[]string{"help", "policy"}, 0, "--wait-time duration|auto"},
		{[]string{"-v"}, 0, "layout"},
		{[]string{"infer", "affine", "1", "2"}, 1, "ringbatch: a row of x:f32[4] takes 4 values, got 2\n"},
		{[]string{"infer", "affine", "one", "2", "3", "4"}, 1, "input \"x\": wrong element type: \"one\" is no f32"},
		{append([]string{"infer", "affine"}, strings.Fields(strings.Repeat("1 ", 4*33))...), 1, "more rows than max_batch_size"},
		{[]string{"infer", "nobody", "1"}, 1, "no such model"},
		{[]string{"infer", "affine", "1", "2", "3", "4", "--timeout", "100ms"}, 1, "deadline"},
		{[]string{"broker"}, 1, "another broker"},
		{[]string{"stats", "--socket", "nowhere.sock"}, 1, "start one with: ringbatch broker (socket nowhere.sock; RINGBATCH_SOCKET " +
			"names another)\n"},
		{[]string{"broker", "--help"}, 0, "Examples"},
		{[]string{"version"}, 0, "layout"},
		{[]string{"licenses"}, 0, "google.golang.org/grpc"},
		{[]string{"doctor"}, 0, "kernel"},
		{[]string{"doctor", "--socket", "/tmp/" + strings.Repeat("x", 100)}, 1, "at most 98"},
		{[]string{"doctor", "--socket", "/etc/passwd/b.sock"}, 1, "not a folder"},
	} {
		if out, code := c.run(m.args...); code != m.code || !strings.Contains(out, m.says) {
			t.Errorf("ringbatch %s: status %d, want %d and %q:\n%s", strings.Join(m.args, " "), code, m.code, m.says, out)
		}
	}
}

func TestHelpFitsAScreenAndSpellsFlagsWithDashes(t *testing.T) {
	t.Setenv(commandEnv, "1")
	snakeFlag := regexp.MustCompile(`--[a-z0-9]+_`)
	for _, name := range append([]string{"policy"}, names()...) {
		out, err := exec.Command(os.Args[0], "help", name).Output()
		if err != nil || snakeFlag.Match(out) {
			t.Errorf("help %s: %v\n%s", name, err, out)
		}
		if lines := strings.Count(string(out), "\n"); lines > 40 && name != "simulate" {
			t.Errorf("help %s has %d lines", name, lines)
		}
	}
}

func TestPythonsCommandsSayWhatToInstall(t *testing.T) {
	t.Setenv(commandEnv, "1")
	python := filepath.Join(t.TempDir(), "python")
	t.Setenv("PYTHON", python)
	for script, want := range map[string]string{
		`[ "$1" = -c ] || echo "$@"`: "-m ringbatch.serve.serve_cli a.b:c --no-costs --wait-time=5-6 --pad -1\n",
		"exit 1": "ringbatch: ringbatch is not installed for " + python + ": pip install ./python in a clone of ringbatch, " +
			"or name another Python in $PYTHON\n",
	} {
		must.Do(t, os.WriteFile(python, []byte("#!/bin/sh\n"+script+"\n"), 0o700))
		out, _ := exec.Command(os.Args[0], "serve", "a.b:c", "--no-costs", "--wait-time=5-6", "--pad", "-1").CombinedOutput()
		if string(out) != want {
			t.Errorf("%q, want %q", out, want)
		}
	}
}

func names() (list []string) {
	for _, c := range commands() {
		list = append(list, c.name)
	}
	return list
}

func TestStatisticsAreWholeOrAnError(t *testing.T) {
	c := startCLI(t)
	if out, code := c.run("stats", "--json"); code != 0 || !strings.Contains(out, `"processes": []`) {
		t.Errorf("stats --json without worker processes: status %d\n%s", code, out)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	for _, args := range [][]string{{"stats"}, {"stats", "--json"}, {"version"}, {"doctor"},
		{"ready", "--live"}, {"--help"}, {"help", "broker"}, {"help", "policy"}, {"help", "serve"}, {"help", "simulate"}} {
		cmd := exec.Command(c.bin, args...)
		cmd.Stdout = full
		if err := cmd.Run(); cmd.ProcessState.ExitCode() != 1 {
			t.Errorf("%v to a full disk: %v", args, err)
		}
	}
}

func TestASecondSignalLeavesNoWorkerProcessBehind(t *testing.T) {
	for _, second := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		c := startCLI(t)
		c.write("[[worker]]\ncommand = [\"sh\", \"-c\", \"trap '' TERM; echo deaf; while :; do sleep 1; done\"]\nstop_time = \"1h\"\n")
		socket := c.bed.Path("b.sock")
		b := c.start("broker", "--config", c.config, "--socket", socket)
		c.until("the worker ignores SIGTERM", func() bool { return strings.Contains(b.Log(), "msg=deaf") })
		pid := c.statsOf(socket).Processes[0].Pid
		b.Signal(syscall.SIGINT)
		c.until("the broker waits for its worker", func() bool { return strings.Contains(b.Log(), "drained") })
		time.Sleep(2 * onePress) // the broker may have seen the first a moment later
		b.Signal(second)
		b.Signal(second) // in a hurry
		if b.Wait(patience) == testbed.ErrRunning {
			t.Fatalf("%v: it goes on:\n%s", second, b.Log())
		}
		if by := b.State().Sys().(syscall.WaitStatus); !by.Signaled() || by.Signal() != second {
			t.Errorf("%v: it ended by %v", second, by)
		}
		if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
			t.Errorf("%v: the worker runs: %v", second, err)
			_ = syscall.Kill(-pid, syscall.SIGKILL)
		}
	}
}

func TestAnEarlySIGHUPDoesNotEndTheBroker(t *testing.T) {
	c := startCLI(t)
	pipe, socket := c.bed.Path("config"), c.bed.Path("b.sock")
	must.Do(t, syscall.Mkfifo(pipe, 0o600))
	b := c.start("broker", "--config", pipe, "--socket", socket)
	f, err := os.OpenFile(pipe, os.O_WRONLY, 0) // returns when the broker has begun to read
	must.Do(t, err)
	b.Signal(syscall.SIGHUP)
	_, _ = f.WriteString(firstConfig)
	f.Close()
	c.until("it answers", func() bool { _, code := c.run("stats", "--socket", socket); return code == 0 })
	c.ends(b)
}
