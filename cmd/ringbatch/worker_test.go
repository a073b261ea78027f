// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/worker/cuda"
)

// `make cuda-test` runs these once more, in a binary with GPU workers (their names
// begin with TestAWorker): nothing else in the command depends on the tag cuda.

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
	for _, flag := range []string{"--wait_for_broker", "--wait-for-broker", "--wait"} { // two earlier spellings
		out, code := c.run("worker", "echo", "--socket", c.bed.Path("nowhere.sock"), flag, "0.01")
		if code != 1 || strings.Contains(out, "serving") || !strings.Contains(out, "no broker is listening") {
			t.Errorf("without a broker: status %d\n%s", code, out)
		}
	}
	w := c.start("worker", "echo")
	c.until("it says so", func() bool { return strings.Contains(w.Log(), "serving echo: x:f32[16] -> ") })
	c.ends(w)
}

func TestAWorkerOnAGPUThatIsNotThereSaysSoInOneLine(t *testing.T) {
	if _, err := cuda.Describe(); err == nil {
		t.Skip("there is a GPU here")
	}
	c := startCLI(t)
	for _, args := range []string{"worker affine --gpu 0", "worker mlp --gpu 1 --precision f16",
		"worker --ptx k.ptx --input x:f32[4] --output y:f32[4]"} {
		if out, code := c.run(strings.Fields(args)...); code != 1 || !strings.Contains(out, "GPU") || strings.Count(out, "\n") != 1 {
			t.Errorf("ringbatch %s: status %d\n%s", args, code, out)
		}
	}
}
