// SPDX-License-Identifier: Apache-2.0

package load

import (
	"sync"
	"sync/atomic"
)

// stages of a request's life, in order.
var stageNames = [...]string{"claim", "write", "queue", "dispatch", "compute", "wake"}

const (
	stageClaim   = 0
	stageWrite   = 1
	StageCompute = 4
)

// Stages are the nanoseconds of each stage.
type Stages [len(stageNames)]int64

// Recorder counts the requests of one producer that ended in one window.
type Recorder struct {
	window Order
	quit   *atomic.Bool // ends the load early; may be nil
	mu     sync.Mutex
	report Report
}

// Report is one window of one producer, as sent to the parent.
type Report struct {
	Nanos    int64 // length of the window
	Requests int64 // answered
	Items    int64
	Sum      int64 // of latencies
	Stages   Stages
	Errors   map[string]int64
	Latency  durations
}

// Order asks for one window: load from Start on, count from Begin to
// End, then stop.
type Order struct {
	Start, Begin, End int64
}

// NewRecorder records one window.
func NewRecorder(o Order) *Recorder {
	return &Recorder{window: o, report: Report{Latency: durations{}, Nanos: o.End - o.Begin, Errors: map[string]int64{}}}
}

// Over reports whether the load of this window should end.
func (r *Recorder) Over(now int64) bool {
	return now >= r.window.End || r.quit != nil && r.quit.Load()
}

func (r *Recorder) counts(at int64) bool { return at >= r.window.Begin && at < r.window.End }

// Add counts a request that was answered at the given time.
func (r *Recorder) Add(at, latency int64, rows int, st Stages) {
	if !r.counts(at) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Requests++
	r.report.Items += int64(rows)
	r.report.Sum += latency
	for i, d := range st {
		r.report.Stages[i] += d
	}
	r.report.Latency.add(latency)
}

// fail counts failed requests.
func (r *Recorder) fail(at int64, name string, n int64) {
	if !r.counts(at) || n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Errors[name] += n
}

// Report is the finished report.
func (r *Recorder) Report() *Report { return &r.report }
