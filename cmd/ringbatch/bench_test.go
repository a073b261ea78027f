// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/tools/load"
)

func TestARunningModelIsLoadedInAClosedAndInAnOpenLoop(t *testing.T) {
	c := startCLI(t)
	c.simulated(1)
	for _, flags := range []string{"--clients 2 --in-flight 2 --rows 2 --duration 0.3", "--rate 50 --clients 3 --duration 1"} {
		c.until("every figure is there: "+flags, func() bool { // a machine may stand still for so long
			out, code := c.run(strings.Fields("bench simulated --warmup 0 --json " + flags)...)
			var r load.Result
			if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 {
				t.Fatalf("%s: status %d: %v\n%s", flags, code, err, out)
			}
			// Each batch takes at least 3 ms: less cannot be.
			if r.Requests > 0 && (r.Throughput <= 0 || r.Latency.P50 < 3 || r.Breakdown.Compute < 3) {
				t.Fatalf("%s: %s", flags, out)
			}
			return r.Requests > 0 && len(r.BatchSize.Histogram) > 0 && r.CPU.Worker > 0
		})
	}
	c.must("set", "simulated", "max_queue=1")
	c.until("what is refused has a name", func() bool {
		out, code := c.run(strings.Fields("bench simulated --duration 0.3 --warmup 0 --clients 20")...)
		if code != 0 {
			t.Fatalf("with a short queue: status %d\n%s", code, out)
		}
		return strings.Contains(out, "QueueFull")
	})
}

func TestAnInterruptedBenchmarkPrintsWhatThereIs(t *testing.T) {
	c := startCLI(t)
	w := c.start("worker", "simulated", "--simulated-fixed", "100ms", "--simulated-item", "0s", "--max-batch-size", "8", "--input",
		"x:i64[3]")
	t.Cleanup(func() { c.ends(w) })
	c.until("the worker is attached", func() bool { m := c.model("simulated"); return m != nil && len(m.Workers) == 1 })
	p := c.start("bench", "simulated", "--duration", "3000", "--warmup", "0")
	// A window is 1 s long, and eight requests take 100 ms at least: more than that many
	// are in the next one, however slow the machine is.
	c.until("it has measured one window", func() bool { return c.model("simulated").Requests > 120 })
	p.Signal(syscall.SIGINT)
	if err := p.Wait(patience); err == nil || p.State().ExitCode() != 130 || !strings.Contains(p.Log(), "throughput") {
		t.Errorf("%v\n%s", err, p.Log())
	}
	c.until("its clients have gone", func() bool { return c.model("simulated").Clients == 0 })
}

func TestABenchmarkThatCannotWorkSaysSo(t *testing.T) {
	c := startCLI(t)
	for args, want := range map[string]string{
		"bench affine":              "no worker that could be measured",
		"bench nobody":              "ringbatch models lists them",
		"bench affine --clients 0":  "must be 1..4096",
		"bench affine --duration 0": "must be 0.3..86400",
		"bench affine --rate -1":    "must be 0..10000000",
		"bench affine --rows 0":     "must be 1..1048576",
	} {
		if out, code := c.run(strings.Fields(args)...); code == 0 || !strings.Contains(out, want) {
			t.Errorf("%s: status %d, want %q\n%s", args, code, want, out)
		}
	}
}

func TestAPipelineIsLoadedAsAModel(t *testing.T) {
	c := startCLI(t)
	c.reload(firstConfig + `
[[model]]
name = "line"
inputs = ["x:f32[4]"]
[[model.stage]]
name = "first"
inputs = ["x"]
outputs = ["y:f32[4]"]
`)
	c.until("the pipeline is declared", func() bool { return c.model("line") != nil })
	w := c.start("worker", "affine", "--name", "line/first", "--input", "x:f32[4]")
	t.Cleanup(func() { c.ends(w) })
	c.until("its stage has a worker", func() bool { m := c.model("line"); return m != nil && m.ReadyWorkers == 1 })
	out, code := c.run(strings.Fields("bench line --duration 0.3 --warmup 0 --clients 2")...)
	if code != 0 || !strings.Contains(out, "throughput") {
		t.Errorf("status %d\n%s", code, out)
	}
	if out, code := c.run("bench", "line", "--rows", "33"); code == 0 || !strings.Contains(out, "max_batch_size is 32") {
		t.Errorf("status %d\n%s", code, out)
	}
	if out, code := c.run("simulate", "line"); code == 0 || !strings.Contains(out, "is a pipeline") {
		t.Errorf("status %d\n%s", code, out)
	}
	if out, _ := c.run("stats", "line"); strings.Contains(out, "no worker") || !strings.Contains(out,
		"its workers are those of line/first") {
		t.Errorf("stats of a pipeline whose stage has a worker:\n%s", out)
	}
}

func TestABenchWhoseWorkersHaveGoneCanBeInterrupted(t *testing.T) {
	c := startCLI(t)
	w := c.start("worker", "simulated", "--simulated-fixed", "2ms")
	c.until("the worker is attached", func() bool { m := c.model("simulated"); return m != nil && len(m.Workers) == 1 })
	p := c.start("bench", "simulated", "--duration", "600", "--warmup", "0")
	c.until("some batches have run", func() bool { return c.model("simulated").Batches > 20 })
	w.Kill()
	c.until("requests wait that nobody will answer", func() bool {
		m := c.model("simulated")
		return len(m.Workers) == 0 &&
			m.QueueLength > 0
	})
	p.Signal(syscall.SIGINT)
	if err := p.Wait(patience); err == nil || p.State().ExitCode() != 130 {
		t.Errorf("%v\n%s", err, p.Log())
	}
}
