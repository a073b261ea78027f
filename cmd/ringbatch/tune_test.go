// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/tune"
	"github.com/ringbatch/ringbatch/worker"
)

// tuning is a cli for tune. The worker command writes the pid of each of its processes to
// pids, and temp has all temporary files.
type tuning struct {
	*cli
	pids, temp string
}

func startTuning(t *testing.T) *tuning {
	bed, err := testbed.New(context.Background())
	must.Do(t, err)
	t.Cleanup(bed.Close)
	t.Setenv(commandEnv, "1")
	x := &tuning{&cli{t: t, bin: os.Args[0], bed: bed}, bed.Path("pids"), bed.Path("t")}
	must.Do(t, os.Mkdir(x.temp, 0o700))
	t.Setenv("TMPDIR", x.temp)
	return x
}

// worker is a command whose batches take at least 2 ms and 1 ms for each row.
func (x *tuning) worker() string {
	return fmt.Sprintf("echo $$ >> %s; exec %s worker --model simulated --simulated-fixed 2ms --simulated-item 1ms --max-batch-size 8",
		x.pids, x.bin)
}

// background is a command that has ended when its worker attaches from another session.
func (x *tuning) background() string {
	return "setsid sh -c 'while kill -0 $PPID 2>/dev/null; do sleep 0.01; done; " + x.worker() + "' &"
}

// quick are flags that make it short. Numbers given besides are tried, too.
var quick = []string{"--instances", "1", "--batch-sizes", "8"}

func (x *tuning) tune(args ...string) (out string, code int) {
	for window := 100 * time.Millisecond; window < 10*time.Second; window *= 2 {
		out, code = x.run(append(append([]string{"tune", "--window", window.String()}, quick...), args...)...)
		if code != 1 || !strings.Contains(out, "measured served the load") { // else the machine stood still for its windows: longer ones
			break
		}
		x.t.Logf("once more, with longer windows than %v:\n%s", window, out)
	}
	return out, code
}

// workersEnded reports whether all workers have ended.
func (x *tuning) workersEnded() bool {
	text, _ := os.ReadFile(x.pids)
	for _, pid := range strings.Fields(string(text)) {
		if !hasEnded(atoi(pid)) {
			return false
		}
	}
	return true
}

// nothingIsLeft checks that all workers have ended, and the private folders too.
func (x *tuning) nothingIsLeft() {
	x.t.Helper()
	x.until("all workers have ended", x.workersEnded)
	if left, _ := os.ReadDir(x.temp); len(left) > 0 {
		x.t.Errorf("folders are left: %v", left)
	}
}

func TestTuneFindsTheSettingAndWritesAConfigurationThatABrokerTakes(t *testing.T) {
	x := startTuning(t)
	config := x.bed.Path("ringbatch.toml")
	out, code := x.tune("--instances", "1,2", "--worker", x.worker(), "--out", config, "--json")
	var r tune.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
		t.Fatalf("status %d: %v\n%s", code, err, out)
	}
	if r.Choice == nil || len(r.Candidates) != 2 {
		t.Fatalf("%s", out)
	}
	choice := slices.IndexFunc(r.Candidates, func(c *tune.Candidate) bool { return c.Setting == *r.Choice })
	for _, c := range r.Candidates {
		if c.Measured == nil || c.Measured.Windows < 3 {
			t.Errorf("%v was not measured: %s", c.Setting, out)
		} else if c.Measured.PerSecond*0.98 > r.Candidates[choice].Measured.PerSecond {
			t.Errorf("it chose %v, but %v did more:\n%s", r.Choice, c.Setting, out)
		}
	}
	x.nothingIsLeft()

	t.Setenv("RINGBATCH_SOCKET", x.bed.Path("private/b.sock"))
	broker := x.start("broker", "--config", config, "--log-level", "warn")
	defer x.ends(broker)
	x.until("the broker answers", func() bool { _, code := x.run("stats"); return code == 0 })
	x.until("its workers are attached", func() bool { m := x.model("simulated"); return m != nil && len(m.Workers) == r.Choice.Instances })
	if m := x.model("simulated"); m.MaxBatchSize != 8 || !m.WaitAuto {
		t.Errorf("%+v", m)
	}
}

func TestTuneDoesNotRecommendMPSWhereThereIsNone(t *testing.T) {
	if _, err := exec.LookPath("nvidia-cuda-mps-control"); err == nil {
		t.Skip("MPS is installed here")
	}
	x := startTuning(t)
	out, code := x.tune("--worker", x.worker(), "--mps")
	if code != 0 || !strings.Contains(out, "note: MPS was not tried: nvidia-cuda-mps-control is not installed") || strings.Contains(out,
		"with MPS") {
		t.Errorf("status %d\n%s", code, out)
	}
	x.nothingIsLeft()
}

// A shell that has become this program leaves it its children, such as those of > >(tee log).
func TestTuneEndsOnlyWhatItHasStarted(t *testing.T) {
	x := startTuning(t)
	file := x.bed.Path("child")
	shell := exec.Command("sh", "-c", `sleep 1000 > /dev/null 2>&1 & echo $! > "$0"; exec "$@"`, file, x.bin, "tune", "--worker",
		"echo $$ >> "+x.pids+"; exit 3")
	out, _ := shell.CombinedOutput()
	text, err := os.ReadFile(file)
	child := atoi(strings.TrimSpace(string(text)))
	if err != nil || child <= 0 {
		t.Fatalf("%v, %q\n%s", err, text, out)
	}
	if hasEnded(child) {
		t.Error("it has ended a process that it has not started")
	} else {
		_ = syscall.Kill(child, syscall.SIGKILL)
	}
	if !strings.Contains(string(out), "the worker command ends before it attaches") {
		t.Errorf("%s", out)
	}
	x.nothingIsLeft()
}

func TestTuneThatCannotWorkSaysWhyAndLeavesNothingRunning(t *testing.T) {
	x := startTuning(t)
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{nil, 2, "--worker says which command"},
		{[]string{"--worker", "x", "--instances", "0"}, 2, "is not a number of 1"},
		{[]string{"--worker", "x", "--window", "1ms"}, 2, "must be 100ms"},
		{[]string{"--worker", "x", "--out", "/no/such/folder/x"}, 1, "cannot be written"},
		{[]string{"--worker", "/no/such/program"}, 1, "no such file"},
		{[]string{"--worker", "echo it has no weights; exit 3"}, 1, "ends before it attaches"},
		{[]string{"--worker", "echo it has no weights; exit 3"}, 1, "it has no weights"},
		{[]string{"--worker", "echo $$ >> " + x.pids + "; exec sleep 1000", "--attach-time", "300ms"}, 1,
			"no worker attached within 300ms"},
		{[]string{"--worker", x.background()}, 1, "must stay in the foreground"},
		{[]string{"--worker", x.worker(), "--out", "/dev/full"}, 1, "recommended: 1 instance(s)"}, // the table is not lost
		{[]string{"--worker", x.worker(), "--gpus", "-1"}, 2, "is not negative"},
		{[]string{"--worker", x.worker(), "--p99", "1ms"}, 1, "no setting that was measured keeps p99 within 1ms"},
		{[]string{"--worker", x.worker(), "--rate", "1000000"}, 1, "no setting that was measured serves 1,000,000 requests/s"},
		{[]string{"--worker", "x", "--rate", "1"}, 2, "too few to judge by"},
	} {
		if out, code := x.tune(c.args...); code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%q: status %d, want %d and %q\n%s", c.args, code, c.code, c.want, out)
		}
		x.nothingIsLeft()
	}
}

func TestTuneWaitsForTheModelItIsToTune(t *testing.T) {
	x := startTuning(t)
	both := fmt.Sprintf("%s worker --model affine & while ! %s ready affine; do sleep 0.01; done; %s", x.bin, x.bin, x.worker())
	if out, code := x.tune("--worker", both, "--model", "simulated"); code != 0 || !strings.Contains(out,
		"simulated: the most requests per second") {
		t.Errorf("the second model of a command: status %d\n%s", code, out)
	}
	x.nothingIsLeft()
	for patience := time.Second; ; patience *= 2 { // for a worker that needs longer than that
		out, code := x.tune("--worker", x.worker(), "--model", "another", "--attach-time", patience.String())
		x.nothingIsLeft()
		if code == 1 && strings.Contains(out, "the command serves simulated, and no worker of --model another attached within") {
			break
		}
		if code != 1 || !strings.Contains(out, "no worker attached within") || patience > time.Minute {
			t.Fatalf("a model that does not come: status %d\n%s", code, out)
		}
	}
}

// narrowWorker makes the test binary be a worker whose batches fail from 4 rows on, as they do where a GPU has no room for them.
const narrowWorker = "narrow worker"

func serveNarrow() {
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	if err != nil {
		panic(err)
	}
	err = worker.Serve(context.Background(), worker.Config{Model: "narrow", Signature: sig, Policy: policy.New(policy.MaxBatchSize(8))},
		func(_ context.Context, b *worker.Batch) error {
			if b.Rows() >= 4 {
				return fmt.Errorf("no room for %d rows", b.Rows())
			}
			b.Output(0)
			time.Sleep(time.Millisecond)
			return nil
		})
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func TestTuneLeavesOutBatchesThatFail(t *testing.T) {
	x := startTuning(t)
	command := fmt.Sprintf("echo $$ >> %s; exec env %s='%s' %s", x.pids, commandEnv, narrowWorker, x.bin)
	out, code := x.tune("--worker", command, "--batch-sizes", "1,2,4", "--json")
	var r tune.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 || r.Choice == nil || r.Choice.MaxBatchSize >= 4 {
		t.Fatalf("status %d, %v\n%s", code, err, out)
	}
	for _, c := range r.Candidates {
		if failed := strings.HasPrefix(c.Note, "errors: "); failed != (c.MaxBatchSize >= 4) {
			t.Errorf("batches of %d: %q", c.MaxBatchSize, c.Note)
		}
	}
	x.nothingIsLeft()
	out, code = x.run("tune", "--worker", command, "--instances", "1", "--batch-sizes", "4", "--window", "100ms")
	if code != 1 || !strings.Contains(out, "no setting that was measured served the load without errors") {
		t.Errorf("only sizes that fail: status %d\n%s", code, out)
	}
	x.nothingIsLeft()
}

// Two signals that are not the same: of two that are, the kernel may keep one.
func TestASecondCtrlCKillsWorkersThatDoNotEnd(t *testing.T) {
	x := startTuning(t)
	stubborn := fmt.Sprintf("trap '' TERM; echo $$ >> %s; while :; do sleep 1; done", x.pids)
	for _, command := range []string{stubborn, `setsid --wait sh -c "` + strings.ReplaceAll(stubborn, "$$", `\$\$`) + `"`} {
		_ = os.Remove(x.pids)
		p := x.start("tune", "--worker", command, "--instances", "1")
		x.until("the worker runs", func() bool { text, _ := os.ReadFile(x.pids); return len(text) > 0 })
		p.Signal(syscall.SIGINT)
		p.Signal(syscall.SIGTERM)
		if err := p.Wait(patience); err == nil || p.State().ExitCode() != 130 || !strings.Contains(p.Log(), "every process was ended") {
			t.Errorf("%v\n%s", err, p.Log())
		}
		x.nothingIsLeft()
	}
}

func TestAnInterruptedTuneLeavesNothingRunningAndKeepsWhatWasMeasured(t *testing.T) {
	x := startTuning(t)
	workers := func() int {
		text, _ := os.ReadFile(x.pids)
		return len(strings.Fields(string(text)))
	}
	// batches is how many the private broker's workers have done.
	batches := func() uint64 {
		sockets, _ := filepath.Glob(filepath.Join(x.temp, "*", "broker.sock"))
		for _, socket := range sockets {
			if s, err := admin.New(socket).Stats(t.Context()); err == nil && s.Model("simulated") != nil {
				return s.Model("simulated").Batches
			}
		}
		return 0
	}
	notIgnored := make(chan os.Signal, 1)
	signal.Notify(notIgnored, syscall.SIGHUP) // nor by what we start, though these tests may run under nohup
	defer signal.Stop(notIgnored)
	for _, c := range []struct {
		signal syscall.Signal
		when   func() bool
		says   string
	}{
		{syscall.SIGINT, func() bool { return workers() > 0 }, "every process was ended"},
		{syscall.SIGHUP, func() bool { return workers() > 0 }, "every process was ended"},                     // its terminal was closed
		{syscall.SIGTERM, func() bool { return batches() > 30 }, "interrupted: other settings may be better"}, // with the table
	} {
		_ = os.Remove(x.pids)
		p := x.start("tune", "--worker", x.worker(), "--instances", "1,2", "--batch-sizes", "1,8", "--window", "1m")
		x.until("it is under way", c.when)
		p.Signal(c.signal)
		if c.signal == syscall.SIGHUP { // it comes from the shell and from the kernel
			x.until("it has ended", func() bool {
				p.Signal(c.signal)
				return p.Wait(time.Millisecond) != testbed.ErrRunning
			})
		}
		if err := p.Wait(patience); err == nil || p.State().ExitCode() != 130 || !strings.Contains(p.Log(), c.says) {
			t.Errorf("%v\n%s", err, p.Log())
		}
		x.nothingIsLeft()
	}
	// Killed, it cannot clean up; its processes still end.
	_ = os.Remove(x.pids)
	p := x.start("tune", "--worker", x.worker(), "--instances", "2", "--window", "1m")
	x.until("workers have been started", func() bool { return workers() >= 2 }) // that of the first look, and the next
	p.Kill()
	x.until("its workers have ended", x.workersEnded)
}
