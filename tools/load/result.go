// SPDX-License-Identifier: Apache-2.0

package load

import (
	"time"
)

// Result is one measured point. docs/benchmark.md documents its JSON keys, which may
// only grow.
type Result struct {
	Config       *Config          `json:"config,omitempty"`
	Note         string           `json:"note,omitempty"` // "simulated: …" where the model only simulates
	Throughput   float64          `json:"throughput"`     // requests per second
	ItemsPerS    float64          `json:"items_per_s"`
	Latency      latencies        `json:"latency_ms"`
	BatchSize    batchSizes       `json:"batch_size"`
	Breakdown    breakdown        `json:"breakdown_ms"` // averages
	CPU          cpuPerRequest    `json:"cpu_us_per_request"`
	Errors       map[string]int64 `json:"errors"`
	Bound        *Bound           `json:"bound,omitempty"`
	RatioToBound float64          `json:"ratio_to_bound,omitempty"`
	Alone        *Bound           `json:"alone,omitempty"`          // single producer: the model alone on its requests
	RatioToAlone float64          `json:"ratio_to_alone,omitempty"` // of the average latencies
	Stable       bool             `json:"stable"`
	Windows      []float64        `json:"windows_items_per_s"` // all windows, the last three of which count
	Requests     int64            `json:"requests"`            // measured
	OtherCPU     float64          `json:"other_cpu_percent"`   // of the machine, used by other programs
}

type latencies struct {
	Avg  float64 `json:"avg"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p999"`
	Max  float64 `json:"max"`
}

type batchSizes struct {
	Avg       float64        `json:"avg"`
	Histogram map[int]uint64 `json:"histogram"` // batches by their rows
}

type breakdown struct {
	Claim    float64 `json:"claim"`
	Write    float64 `json:"write"`
	Queue    float64 `json:"queue"`
	Dispatch float64 `json:"dispatch"`
	Compute  float64 `json:"compute"`
	Wake     float64 `json:"wake"`
}

type cpuPerRequest struct {
	Broker float64 `json:"broker"`
	Client float64 `json:"client"`
	Worker float64 `json:"worker"`
}

// Config is the key "config" of the JSON. Names follow the
// SimpleDBI benchmark.
type Config struct {
	WorkerNum      int     `json:"worker_num"`
	WorkerBatch    int     `json:"worker_batch"`
	MaxBatchSize   int     `json:"max_batch_size"`
	ModelNum       int     `json:"model_num"`
	WaitTime       Seconds `json:"wait_time"` // in seconds
	NoDynamicBatch bool    `json:"no_dynamic_batch"`
	ModelType      string  `json:"model_type"`
	ModelPath      string  `json:"model_path,omitempty"`
	DataType       string  `json:"data_type"`
	InputShape     []int   `json:"input_shape,omitempty"`
	Duration       Seconds `json:"duration"` // of one window
	Warmup         Seconds `json:"warmup"`
	InFlight       int     `json:"in_flight"`
	Rate           float64 `json:"rate,omitempty"` // requests per second of all producers; 0: closed loop
	Stability      float64 `json:"stability_percent"`
	MaxWindows     int     `json:"max_windows"`
	Seed           int64   `json:"seed"`
	SimulatedFixed Seconds `json:"simulated_fixed,omitempty"`
	SimulatedItem  Seconds `json:"simulated_item,omitempty"`

	AllWindows bool `json:"-"` // measure all of MaxWindows, and count all
}

// usage counts CPU time and batches up to some moment.
type usage struct {
	cpu     [3]time.Duration // broker, producers, workers
	batches map[int]uint64   // by rows
	others  time.Duration    // CPU time of other programs
	span    time.Duration    // of all cores
}

// Window is one measuring Window, all producers together.
type Window struct {
	requests, items int64
	perSecond       float64 // requests
	itemsPerS       float64
	sum             int64
	stages          Stages
	errors          map[string]int64
	latency         durations
	used            usage
}

func newWindow() *Window {
	return &Window{errors: map[string]int64{}, latency: durations{}, used: usage{batches: map[int]uint64{}}}
}

// addReport adds the report of one producer.
func (w *Window) addReport(r *Report) {
	w.latency.merge(r.Latency)
	w.requests += r.Requests
	w.items += r.Items
	w.perSecond += float64(r.Requests) / (float64(r.Nanos) / 1e9)
	w.itemsPerS += float64(r.Items) / (float64(r.Nanos) / 1e9)
	w.sum += r.Sum
	for i, d := range r.Stages {
		w.stages[i] += d
	}
	for name, n := range r.Errors {
		w.errors[name] += n
	}
}

// addUsage adds the usage between two moments.
func (w *Window) addUsage(before, after usage) {
	for i := range w.used.cpu {
		w.used.cpu[i] += after.cpu[i] - before.cpu[i]
	}
	w.used.others += after.others - before.others
	w.used.span += after.span - before.span
	for rows, n := range after.batches {
		if d := n - before.batches[rows]; d > 0 {
			w.used.batches[rows] += d
		}
	}
}

func (w *Window) sample() sample {
	return sample{w.itemsPerS, float64(w.sum) / float64(max(w.requests, 1))}
}

// merge makes one window of several; rates become their mean.
func merge(windows []*Window) *Window {
	m := newWindow()
	for _, w := range windows {
		m.requests += w.requests
		m.items += w.items
		m.perSecond += w.perSecond / float64(len(windows))
		m.itemsPerS += w.itemsPerS / float64(len(windows))
		m.sum += w.sum
		for i, d := range w.stages {
			m.stages[i] += d
		}
		for name, n := range w.errors {
			m.errors[name] += n
		}
		m.latency.merge(w.latency)
		m.addUsage(usage{}, w.used)
	}
	return m
}

// Summarize turns windows into a result, of which the last ones count.
func Summarize(windows []*Window, isStable bool, counted int) *Result {
	m := merge(windows[max(0, len(windows)-counted):])
	r := &Result{
		Throughput: m.perSecond, ItemsPerS: m.itemsPerS, Requests: m.requests, Errors: m.errors, Stable: isStable,
		Latency: m.latencies(), BatchSize: batchSizes{Histogram: m.used.batches},
	}
	for _, w := range windows {
		r.Windows = append(r.Windows, w.itemsPerS)
	}
	n := float64(max(m.requests, 1))
	at := func(i int) float64 { return float64(m.stages[i]) / n / 1e6 }
	r.Breakdown = breakdown{at(0), at(1), at(2), at(3), at(4), at(5)}
	us := func(i int) float64 { return float64(m.used.cpu[i]) / n / 1e3 }
	r.CPU = cpuPerRequest{Broker: us(0), Client: us(1), Worker: us(2)}
	if m.used.span > 0 {
		r.OtherCPU = max(0, 100*float64(m.used.others)/float64(m.used.span))
	}
	var batches, rows uint64
	for size, count := range m.used.batches {
		batches += count
		rows += uint64(size) * count
	}
	if batches > 0 {
		r.BatchSize.Avg = float64(rows) / float64(batches)
	}
	return r
}

func (w *Window) latencies() latencies {
	if w.requests == 0 {
		return latencies{}
	}
	at := w.latency.milliseconds(.5, .9, .95, .99, .999, 1)
	return latencies{Avg: float64(w.sum) / float64(w.requests) / 1e6, P50: at[0], P90: at[1], P95: at[2], P99: at[3], P999: at[4], Max: at[5]}
}

// each names the parts of the breakdown, in order.
func (b breakdown) each() [len(stageNames)]float64 {
	return [...]float64{b.Claim, b.Write, b.Queue, b.Dispatch, b.Compute, b.Wake}
}

// Bound is the keys "bound" and "alone".
type Bound struct {
	ItemsPerS float64   `json:"items_per_s"`
	Latency   latencies `json:"latency_ms"`
	CPU       float64   `json:"cpu_us_per_item"`
	Windows   []float64 `json:"windows_items_per_s"`
}

// boundOf summarizes the bound's windows, of which the last three count.
func boundOf(windows []*Window) *Bound {
	r := Summarize(windows, true, MinWindows)
	perItem := r.CPU.Client * r.Throughput / max(r.ItemsPerS, 1)
	return &Bound{ItemsPerS: r.ItemsPerS, Latency: r.Latency, CPU: perItem, Windows: r.Windows}
}

// Compare puts beside the result what the model gives without a broker: with full batches, and for a single producer alone.
// Both may be empty.
func (r *Result) Compare(full, single []*Window) {
	if len(full) > 0 {
		r.Bound = boundOf(full)
		r.RatioToBound = r.ItemsPerS / max(r.Bound.ItemsPerS, 1e-9)
	}
	if len(single) > 0 {
		r.Alone = boundOf(single)
		r.RatioToAlone = r.Latency.Avg / max(r.Alone.Latency.Avg, 1e-9)
	}
}
