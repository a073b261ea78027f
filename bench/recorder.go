package main

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/ringbatch/ringbatch/shm"
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

const stageCompute = 4

type stages [len(stageNames)]int64 // nanoseconds

// recorder gathers what one producer saw, window by window.
type recorder struct {
	mu     sync.Mutex
	began  int64
	hist   *hdrhistogram.Histogram
	report windowReport
}

// windowReport is one window of one producer, as it travels to the parent.
type windowReport struct {
	Nanos    int64 // how long the window really was
	Requests int64
	Items    int64
	Sum      int64 // of latencies
	Stages   stages
	Errors   map[string]int64
	Latency  []byte // HdrHistogram, compressed
}

func newRecorder() *recorder { return &recorder{hist: newHistogram()} }

// add counts a request that went well.
func (r *recorder) add(latency int64, rows int, st stages) {
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

// fail counts one that did not.
func (r *recorder) fail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.report.Errors == nil {
		r.report.Errors = map[string]int64{}
	}
	r.report.Errors[errorName(err)]++
}

// cut ends the present window and begins the next.
func (r *recorder) cut() (*windowReport, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := shm.Now()
	w := r.report
	w.Nanos = now - r.began
	var err error
	if w.Latency, err = r.hist.Encode(hdrhistogram.V2CompressedEncodingCookieBase); err != nil {
		return nil, fmt.Errorf("encode latencies: %w", err)
	}
	r.began, r.report = now, windowReport{}
	r.hist.Reset()
	return &w, nil
}

// windowOrder starts a producer: warm up from Start to Begin, then report
// every Window, for ever.
type windowOrder struct {
	Start, Begin, Window int64
}

// reportWindows tells the parent of every window until the process ends.
func (c *child) reportWindows(r *recorder, o windowOrder) {
	for at := o.Begin; ; at += o.Window {
		time.Sleep(time.Duration(at - shm.Now()))
		w, err := r.cut()
		if err == nil && at > o.Begin { // what came before Begin was the warm-up
			err = c.tell(w)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
