// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker/cuda"
)

func TestAWorkerAnswersWhatIsTyped(t *testing.T) {
	c := startCLI(t)
	w := c.start("worker", "affine", "--scale", "2", "--offset", "1", "--input", "x:f32[4]")
	t.Cleanup(func() {
		w.Signal(syscall.SIGINT)
		if err := w.Wait(patience); err != nil {
			t.Errorf("worker: %v", err)
		}
	})
	if out, code := c.run("infer", "affine", "1", "2", "3", "4"); code != 0 || !strings.Contains(out, "3 5 7 9") {
		t.Errorf("infer: status %d\n%s", code, out)
	}
	file := filepath.Join(t.TempDir(), "y.npy")
	c.must("infer", "affine", "1", "2", "3", "4", "--out", "y="+file)
	if out, code := c.run("infer", "affine", "--in", "x="+file, "--json"); code != 0 || !strings.Contains(out, "[7,11,15,19]") {
		t.Errorf("infer --in: status %d\n%s", code, out)
	}
	c.until("the broker has heard of all three", func() bool { // workers answer clients first, then the broker
		m := c.stats().Models[0]
		return m.Ended["OK"] == 3 && len(m.Workers) == 1
	})
}

func TestAWorkerSaysThatItServesOnlyOnceItHasAttached(t *testing.T) {
	c := startCLI(t)
	out, code := c.run("worker", "echo", "--socket", c.bed.Path("nowhere.sock"), "--wait", "0.01")
	if code != 1 || strings.Contains(out, "serving") || !strings.Contains(out, "no broker is listening") {
		t.Errorf("without a broker: status %d\n%s", code, out)
	}
	w := c.start("worker", "echo")
	c.until("it says so", func() bool { return strings.Contains(w.Log(), "serving echo: x:f32[16] -> ") })
	c.ends(w)
}

func TestAWorkerOfAnotherProgramIsRefusedByName(t *testing.T) {
	c := startCLI(t)
	serve := func(scale string, more ...string) []string {
		return append([]string{"worker", "affine", "--input", "x:f32[4]", "--scale", scale}, more...)
	}
	workers := func(n int) func() bool { return func() bool { return len(c.stats().Models[0].Workers) == n } }
	first := c.start(serve("2")...)
	c.until("the first serves", workers(1))
	out, code := c.run(serve("3")...)
	for _, want := range []string{`"affine"`, fmt.Sprint("pid ", first.Pid()), "scale=2", "scale=3", "--join any"} {
		if code != 1 || !strings.Contains(out, want) {
			t.Errorf("the second: status %d, without %q\n%s", code, want, out)
		}
	}
	twin := c.start(serve("2")...)
	c.until("a worker of the same program joins", workers(2))
	other := c.start(serve("3", "--join", "any")...)
	c.until("another may join any", workers(3))
	if out, code := c.run(serve("4")...); code != 1 || !strings.Contains(out, "scale=4") {
		t.Errorf("a third program, which does not say that it joins: status %d\n%s", code, out)
	}
	for _, p := range []*testbed.Process{first, twin, other} {
		c.ends(p)
	}
}

func TestAClientThatFindsNoModelHearsWhichProcessesAreStarting(t *testing.T) {
	c := startCLI(t)
	c.reload(firstConfig + "[[worker]]\ncommand = [\"sleep\", \"1000\"]\ninstances = 2\n")
	c.until("both processes run", func() bool {
		s := c.stats().Processes
		return len(s) == 2 && s[0].Pid > 0 && s[1].Pid > 0
	})
	out, code := c.run("infer", "late", "1")
	for _, p := range c.stats().Processes {
		if code != 1 || !strings.Contains(out, fmt.Sprintf("%s (pid %d) for ", p.Name, p.Pid)) {
			t.Errorf("status %d, without %s\n%s", code, p.Name, out)
		}
	}
}

func TestAWorkerOnAGPUThatIsNotThereSaysSoInOneLine(t *testing.T) {
	if _, err := cuda.Describe(); err == nil {
		t.Skip("there is a GPU here")
	}
	c := startCLI(t)
	for _, args := range []string{"worker affine --gpu 0", "worker mlp --gpu 1",
		"worker --ptx k.ptx --input x:f32[4] --output y:f32[4]"} {
		if out, code := c.run(strings.Fields(args)...); code != 1 || !strings.Contains(out, "GPU") || strings.Count(out, "\n") != 1 {
			t.Errorf("ringbatch %s: status %d\n%s", args, code, out)
		}
	}
}
