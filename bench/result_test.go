// SPDX-License-Identifier: Apache-2.0

package bench

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
func recorded(t *testing.T, rows int, latencies ...time.Duration) *windowReport {
	t.Helper()
	r := newRecorder(windowOrder{Begin: 100, End: 100 + int64(time.Second)})
	for _, d := range latencies {
		r.add(200, int64(d), rows, stages{1, 2, 3, 4, 5, 6})
	}
	r.fail(200, errorName(fmt.Errorf("sending: %w", status.ErrQueueFull)), 1)
	r.fail(200, errorName(errors.New("odd")), 1)
	w, err := r.result()
	must.Do(t, err)
	return w
}

func windowOf(t *testing.T, reports ...*windowReport) *window {
	t.Helper()
	w := newWindow()
	for _, r := range reports {
		must.Do(t, w.addReport(r))
	}
	return w
}

func TestWindowsOfManyProducersAddUp(t *testing.T) {
	ms := time.Millisecond
	w := windowOf(t, recorded(t, 2, 1*ms, 3*ms), recorded(t, 2, 8*ms))
	w.addUsage(usage{batches: map[int]uint64{4: 1}}, usage{cpu: [3]time.Duration{3 * time.Microsecond, 6 * time.Microsecond,
		9 * time.Microsecond}, batches: map[int]uint64{2: 1, 4: 2}})
	r := summarize([]*window{w, w, w, w}, true, minWindows)
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
	r := newRecorder(windowOrder{Start: 0, Begin: 1000, End: 2000})
	for _, at := range []int64{0, 999, 1000, 1999, 2000, 5000} {
		r.add(at, 500, 1, stages{})
		r.fail(at, "odd", 1)
	}
	w, err := r.result()
	must.Do(t, err)
	if w.Requests != 2 || w.Errors["odd"] != 2 || w.Nanos != 1000 {
		t.Errorf("got %d requests, errors %v, %d ns; want 2, 2, 1000", w.Requests, w.Errors, w.Nanos)
	}
}

func TestTheJSONKeysAreTheDocumentedOnes(t *testing.T) {
	o, err := parse("--worker_num=2")
	must.Do(t, err)
	r := summarize([]*window{windowOf(t, recorded(t, 1, time.Millisecond))}, false, minWindows)
	r.Config = &o.cfg
	r.compare(&boundWindows{
		full:   []*window{windowOf(t, recorded(t, 2, time.Millisecond))},
		single: []*window{windowOf(t, recorded(t, 1, 500*time.Microsecond))},
	})
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
