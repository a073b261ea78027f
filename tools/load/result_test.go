// SPDX-License-Identifier: Apache-2.0

package load

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

// recorded makes the report of a producer that saw these latencies in one
// second.
func recorded(t *testing.T, rows int, latencies ...time.Duration) *Report {
	t.Helper()
	r := NewRecorder(Order{Begin: 100, End: 100 + int64(time.Second)})
	for _, d := range latencies {
		r.Add(200, int64(d), rows, Stages{1, 2, 3, 4, 5, 6})
	}
	r.fail(200, errorName(fmt.Errorf("sending: %w", status.ErrQueueFull)), 1)
	r.fail(200, errorName(errors.New("odd")), 1)
	return r.Report()
}

func windowOf(t *testing.T, reports ...*Report) *Window {
	t.Helper()
	w := newWindow()
	for _, r := range reports {
		w.addReport(r)
	}
	return w
}

func TestWindowsOfManyProducersAddUp(t *testing.T) {
	ms := time.Millisecond
	w := windowOf(t, recorded(t, 2, 1*ms, 3*ms), recorded(t, 2, 8*ms))
	w.addUsage(usage{batches: map[int]uint64{4: 1}}, usage{cpu: [3]time.Duration{3 * time.Microsecond, 6 * time.Microsecond,
		9 * time.Microsecond}, batches: map[int]uint64{2: 1, 4: 2}})
	r := Summarize([]*Window{w, w, w, w}, true, MinWindows)
	if r.Throughput != 3 || r.ItemsPerS != 6 || r.Requests != 9 {
		t.Errorf("%v requests/s, %v items/s, %d requests; want 3, 6, 9", r.Throughput, r.ItemsPerS, r.Requests)
	}
	near := func(name string, got, want float64) {
		if math.Abs(got-want) > 0.002*want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	near("average", r.Latency.Avg, 4)
	near("median", r.Latency.P50, 3)
	near("maximum", r.Latency.Max, 8)
	near("broker", r.CPU.Broker, 1)
	near("client", r.CPU.Client, 2)
	near("worker", r.CPU.Worker, 3)
	near("batch", r.BatchSize.Avg, 3)
	near("queue", r.Breakdown.Queue, 3e-6)
	if r.Errors[status.ErrQueueFull.Name()] != 6 || r.Errors["odd"] != 6 {
		t.Errorf("errors %v", r.Errors)
	}
}

func TestOnlyWhatEndsInTheWindowCounts(t *testing.T) {
	r := NewRecorder(Order{Start: 0, Begin: 1000, End: 2000})
	for _, at := range []int64{0, 999, 1000, 1999, 2000, 5000} {
		r.Add(at, 500, 1, Stages{})
		r.fail(at, "odd", 1)
	}
	w := r.Report()
	if w.Requests != 2 || w.Errors["odd"] != 2 || w.Nanos != 1000 {
		t.Errorf("got %d requests, errors %v, %d ns; want 2, 2, 1000", w.Requests, w.Errors, w.Nanos)
	}
}

func TestTheJSONKeysAreTheDocumentedOnes(t *testing.T) {
	r := Summarize([]*Window{windowOf(t, recorded(t, 1, time.Millisecond))}, false, MinWindows)
	r.Config = &Config{WorkerNum: 2}
	r.Compare([]*Window{windowOf(t, recorded(t, 2, time.Millisecond))}, []*Window{windowOf(t, recorded(t, 1, 500*time.Microsecond))})
	got := keys(t, r)
	for _, key := range []string{"config", "throughput", "items_per_s", "latency_ms", "batch_size", "breakdown_ms", "cpu_us_per_request",
		"errors", "bound", "ratio_to_bound", "alone", "ratio_to_alone", "stable"} {
		if got[key] == nil {
			t.Errorf("no key %q", key)
		}
	}
	for parent, children := range map[string][]string{
		"latency_ms":         {"avg", "p50", "p90", "p95", "p99", "p999", "max"},
		"batch_size":         {"avg", "histogram"},
		"breakdown_ms":       {"claim", "write", "queue", "dispatch", "compute", "wake"},
		"cpu_us_per_request": {"broker", "client", "worker"},
		"bound":              {"items_per_s", "latency_ms"},
		"config": {"worker_num", "worker_batch", "max_batch_size", "model_num", "wait_time", "no_dynamic_batch", "model_type",
			"data_type", "duration", "warmup", "in_flight", "seed"},
	} {
		inner, _ := got[parent].(map[string]any)
		for _, key := range children {
			if _, ok := inner[key]; !ok {
				t.Errorf("no key %q in %q", key, parent)
			}
		}
	}
	if got["ratio_to_bound"] != 0.5 {
		t.Errorf("ratio_to_bound is %v, want 0.5", got["ratio_to_bound"])
	}
}

func keys(t *testing.T, v any) map[string]any {
	t.Helper()
	data, err := json.Marshal(v)
	must.Do(t, err)
	var m map[string]any
	must.Do(t, json.Unmarshal(data, &m))
	return m
}
