// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

// TestMain lets the test binary run the roles of the benchmark.
func TestMain(m *testing.M) {
	testbed.Play(Roles())
	os.Exit(m.Run())
}

// These run the whole program over real processes, and check the report, not the speed.

func TestAShortRunReportsEverything(t *testing.T) {
	out, r := measuredRun(t, "--model_type=affine --worker_num=3 --worker_batch=2 --in_flight=2 --max_batch_size=8 --wait_time=1ms "+
		"--warmup=0.1 --max_windows=3")
	for _, want := range []string{"throughput", "of the bound", "latency, ms", "where the time went", "batch size", "CPU µs/request",
		"errors         none"} {
		if !strings.Contains(out, want) {
			t.Errorf("the report does not say %q:\n%s", want, out)
		}
	}
	if r.Throughput <= 0 || r.ItemsPerS <= r.Throughput || r.Latency.P50 <= 0 || r.RatioToBound <= 0 || r.CPU.Broker <= 0 ||
		r.BatchSize.Avg < 2 {
		t.Errorf("figures are missing: %+v", r)
	}
}

// measuredRun is a short run and its output. If the machine stands still for a whole
// window, it runs again with longer ones.
func measuredRun(t *testing.T, args string) (printed string, r load.Result) {
	t.Helper()
	js := filepath.Join(t.TempDir(), "r.json")
	for i := range 8 {
		var out strings.Builder
		if err := Run(t.Context(), strings.Fields(fmt.Sprintf("%s --duration=%v --json=%s", args, 0.2*float64(int(1)<<i), js)),
			&out); err != nil {
			t.Fatal(err)
		}
		printed, r = out.String(), written(t, js)
		if !slices.Contains(r.Windows, 0) && len(r.BatchSize.Histogram) > 0 && (r.Bound == nil || r.RatioToBound > 0) {
			break
		}
	}
	return printed, r
}

// written reads the file of --json.
func written(t *testing.T, path string) (r load.Result) {
	t.Helper()
	data, err := os.ReadFile(path)
	must.Do(t, err)
	must.Do(t, json.Unmarshal(data, &r))
	return r
}

func TestAnOpenLoopIsMeasured(t *testing.T) {
	var out strings.Builder
	err := Run(t.Context(), strings.Fields("--model_type=simulated --simulated_fixed=1ms --simulated_item=0 --rate=200 "+
		"--worker_num=2 --duration=0.2 --warmup=0 --max_windows=3 --bound=false"), &out)
	must.Do(t, err)
	if s := out.String(); !strings.Contains(s, "simulated: sleeps") || !strings.Contains(s, "from the intended send time") {
		t.Errorf("got:\n%s", s)
	}
}

func TestAWorkerThatDiesEndsTheRunWithItsReason(t *testing.T) {
	o, err := parse(strings.Fields("--model_type=echo --worker_num=1 --bound=false --duration=30 --warmup=0")...)
	must.Do(t, err)
	f, err := newFleet(t.Context())
	must.Do(t, err)
	defer f.Close()
	s, err := f.serve(&o.cfg, progress.New())
	must.Do(t, err)
	s.workers[0].Kill()
	if _, err := s.through(1, nil, progress.New()); err == nil || !strings.Contains(err.Error(), "model worker") {
		t.Errorf("got %v", err)
	}
}

func TestAReportThatCannotBePrintedIsAnError(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	js := filepath.Join(t.TempDir(), "r.json")
	err = Run(t.Context(), strings.Fields("--model_type=echo --worker_num=1 --bound=false --duration=0.1 --warmup=0 --max_windows=3 "+
		"--json="+js), full)
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v", err)
	}
	if r := written(t, js); len(r.Windows) == 0 {
		t.Error("the JSON was not written either")
	}
}

func TestAProcessThatFailsSaysWhy(t *testing.T) {
	f, err := newFleet(t.Context())
	must.Do(t, err)
	defer f.Close()
	_, err = f.StartReady(testbed.Spec{Role: "model worker", Job: workerJob{Model: modelJob{Type: "echo", DType: "f7"}}})
	if err == nil || !strings.Contains(err.Error(), `"f7"`) {
		t.Errorf("got %v", err)
	}
}
