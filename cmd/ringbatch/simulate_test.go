// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/npy"
)

// simulated starts workers of a model whose batches take at least 2 ms and 1 ms
// for each row.
func (c *cli) simulated(workers int) {
	c.t.Helper()
	for range workers {
		w := c.start("worker", "simulated", "--simulated-fixed", "2ms", "--simulated-item", "1ms", "--max-batch-size", "8",
			"--input", "x:i64[3]")
		c.t.Cleanup(func() { c.ends(w) })
	}
	c.until("the workers are attached", func() bool { m := c.model("simulated"); return m != nil && len(m.Workers) == workers })
}

func (c *cli) model(name string) *stats.Model {
	s := c.stats()
	return s.Model(name)
}

func (c *cli) waitTime(model string) string { return c.model(model).Policy["wait_time"] }

func TestSimulateMeasuresAModelAndComparesSettings(t *testing.T) {
	c := startCLI(t)
	c.simulated(2)
	costs := c.bed.Path("costs.csv")
	out, code := c.run("simulate", "simulated", "--duration", "1", "--requests", "2000", "--out", costs, "--json")
	var r struct {
		Best struct {
			MaxBatchSize int `json:"max_batch_size"`
		}
		Choices []struct{}
	}
	if err := json.Unmarshal([]byte(out[strings.Index(out, "\n{")+1:]), &r); err != nil || code != 0 {
		t.Fatalf("status %d: %v\n%s", code, err, out)
	}
	if len(r.Choices) != 4*4 || r.Best.MaxBatchSize < 4 { // 1 to 4 workers; 1, 2, 4 and 8 rows
		t.Errorf("%+v", r)
	}
	if !strings.Contains(out, "atching") {
		t.Errorf("no verdict in\n%s", out)
	}
	if out, code := c.run("simulate", "--cost", costs, "--workers", "2", "--max-batch-size", "8", "--rate", "100", "--requests",
		"1000"); code != 0 || !strings.Contains(out, "throughput") {
		t.Errorf("simulate --cost: %d\n%s", code, out)
	}
	if got := c.waitTime("simulated"); got != "auto" {
		t.Errorf("wait_time is %s afterwards", got)
	}
}

func TestAnInterruptedSimulateKeepsWhatWasMeasured(t *testing.T) {
	c := startCLI(t)
	c.simulated(1)
	costs := c.bed.Path("costs.csv")
	p := c.start("simulate", "simulated", "--duration", "600", "--out", costs)
	c.until("some batches have run", func() bool { return c.model("simulated").Batches > 20 })
	if got := c.waitTime("simulated"); got != "0s" {
		t.Errorf("wait_time is %s while it measures", got)
	}
	p.Signal(syscall.SIGINT)
	if err := p.Wait(patience); err == nil || p.State().ExitCode() != 130 {
		t.Errorf("%v\n%s", err, p.Log())
	}
	if text, err := os.ReadFile(costs); err != nil || !strings.Contains(string(text), "\n1,0.0") {
		t.Errorf("the cost file: %v\n%s", err, text)
	}
	if got := c.waitTime("simulated"); got != "auto" {
		t.Errorf("wait_time is %s afterwards", got)
	}
}

func TestAModelThatCannotBeMeasuredSaysWhy(t *testing.T) {
	c := startCLI(t)
	c.simulated(1)
	text := c.bed.Path("text.npy")
	must.Do(t, os.WriteFile(text, []byte("no numbers"), 0o600))
	row := c.bed.Path("row.npy")
	file, err := os.Create(row)
	if err == nil {
		err = errors.Join(npy.Write(file, npy.Array{DType: "i64", Shape: []int{1, 3}, Data: make([]byte, 24)}), file.Close())
	}
	must.Do(t, err)
	for _, x := range []struct {
		args string
		code int
		want string
	}{
		{"simulate affine", 1, "no worker that could be measured"},
		{"simulate nobody", 1, "ringbatch models lists them"},
		{"simulate simulated --duration 0", 2, "must be more than 0"},
		{"simulate simulated --busy 2", 1, "the model has 1"},
		{"simulate simulated --in x=" + text, 1, "not a valid .npy file"},
		{"simulate simulated --in x", 2, "want NAME=FILE.npy"},
		{"simulate simulated --in z=/dev/null", 1, "not an .npy file"},
		{"simulate simulated --in x=" + row + " --in x=" + row, 2, "there is a file for x already"},
		{"simulate simulated --duration 0.1 --out /dev/full", 1, "no space left on device"},
		{"simulate simulated --duration 0.1 --out /dev/full", 1, "atching"}, // the results are not lost
		{"simulate simulated --duration 0.1 --requests 1000", 0, "atching"},
		{"simulate simulated --cost 1=1ms --duration 0.1", 2, "exclude each other"},
		{"simulate --out x", 2, "--out needs a MODEL that runs"},
		{"simulate simulated --out /no/such/folder/x", 1, "cannot be written"},
		{"simulate simulated --socket " + c.bed.Path("private/none"), 1, "broker"},
	} {
		if out, code := c.run(strings.Fields(x.args)...); code != x.code || !strings.Contains(out, x.want) {
			t.Errorf("%s: status %d, want %d and %q\n%s", x.args, code, x.code, x.want, out)
		}
	}
}
