// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Latencies are recorded in nanoseconds, to three digits.
const (
	leastNanos = 100
	mostNanos  = int64(10 * time.Minute)
	digits     = 3
)

func newHistogram() *hdrhistogram.Histogram {
	return hdrhistogram.New(leastNanos, mostNanos, digits)
}

// stages of a request's life, in order.
var stageNames = [...]string{"claim", "write", "queue", "dispatch", "compute", "wake"}

const (
	stageClaim   = 0
	stageWrite   = 1
	stageCompute = 4
)

type stages [len(stageNames)]int64 // nanoseconds

// recorder counts the requests of one producer that ended in one window.
type recorder struct {
	window windowOrder
	quit   *atomic.Bool // ends the load early; may be nil
	mu     sync.Mutex
	hist   *hdrhistogram.Histogram
	report windowReport
}

// windowReport is one window of one producer, as sent to the parent.
type windowReport struct {
	Nanos    int64 // length of the window
	Due      int64 // open loop: requests due in it
	Requests int64 // answered
	Items    int64
	Sum      int64 // of latencies
	Stages   stages
	Errors   map[string]int64
	Latency  []byte // HdrHistogram, compressed
}

// windowOrder asks for one window: load from Start on, count from Begin to
// End, then stop.
type windowOrder struct {
	Start, Begin, End int64
}

func newRecorder(o windowOrder) *recorder {
	return &recorder{window: o, hist: newHistogram(), report: windowReport{Nanos: o.End - o.Begin, Errors: map[string]int64{}}}
}

// over reports whether the load of this window should end.
func (r *recorder) over(now int64) bool {
	return now >= r.window.End || r.quit != nil && r.quit.Load()
}

func (r *recorder) counts(at int64) bool { return at >= r.window.Begin && at < r.window.End }

// due counts a request that is due at the given time.
func (r *recorder) due(at int64) {
	if r.counts(at) {
		r.report.Due++
	}
}

// add counts a request that was answered at the given time.
func (r *recorder) add(at, latency int64, rows int, st stages) {
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
	_ = r.hist.RecordValue(min(max(latency, leastNanos), mostNanos))
}

// fail counts failed requests.
func (r *recorder) fail(at int64, name string, n int64) {
	if !r.counts(at) || n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Errors[name] += n
}

// result is the finished report.
func (r *recorder) result() (*windowReport, error) {
	var err error
	if r.report.Latency, err = r.hist.Encode(hdrhistogram.V2CompressedEncodingCookieBase); err != nil {
		return nil, fmt.Errorf("encode latencies: %w", err)
	}
	return &r.report, nil
}

// eachWindow sends "ready" and runs load for every window that the parent orders.
func eachWindow(c *testbed.Child, load func(*recorder)) error {
	return testbed.Serve(c, func(o windowOrder) (*windowReport, error) {
		r := newRecorder(o)
		rig.SleepUntil(o.Start)
		load(r)
		return r.result()
	})
}
