// SPDX-License-Identifier: Apache-2.0

package load

import (
	"context"
	"fmt"
	"maps"
	"math"
	"os"
	"runtime"
	"time"

	"github.com/ringbatch/ringbatch/internal/cputime"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/shm"
)

// Crowd is the participants of one measurement: the reporters of windows, and the
// processes whose CPU time is watched.
type Crowd struct {
	Reporters []Reporter
	Groups    [3]CPUGroup // broker, producers, workers
	Socket    string      // of the broker, "" if there is none
	Model     string
}

// Reporter runs the load of each window that it receives, and reports. It is a process,
// or a producer in this one.
type Reporter interface {
	Send(command any) error
	Receive(into any) error
}

// usage of all participants so far.
func (c *Crowd) usage(ctx context.Context) (usage, error) {
	u := usage{batches: map[int]uint64{}}
	for i, g := range c.Groups {
		var err error
		if u.cpu[i], err = g.time(); err != nil {
			return u, err
		}
	}
	var err error
	if u.others, err = cputime.Machine(); err != nil {
		return u, err
	}
	u.others -= u.cpu[0] + u.cpu[1] + u.cpu[2]
	if !c.Groups[1].has(os.Getpid()) { // this process is not one of the producers
		own, err := cputime.Of(os.Getpid())
		if err != nil {
			return u, err
		}
		u.others -= own
	}
	u.span = time.Duration(shm.Now() * int64(runtime.NumCPU()))
	if c.Socket == "" {
		return u, nil
	}
	m, err := ModelStats(ctx, c.Socket, c.Model)
	if err != nil {
		return u, err
	}
	maps.Copy(u.batches, m.BatchSize.Histogram)
	return u, nil
}

// Run is one window of all participants: warm up, then measure.
func (c *Crowd) Run(ctx context.Context, warmup, length time.Duration) (*Window, error) {
	start := shm.Now() + int64(LeadTime) + int64(len(c.Reporters))*int64(time.Millisecond)/4
	o := Order{Start: start, Begin: start + int64(warmup)}
	o.End = o.Begin + int64(length)
	for _, p := range c.Reporters {
		if err := p.Send(o); err != nil {
			return nil, err
		}
	}
	w := newWindow()
	var before usage
	for i, at := range []int64{o.Begin, o.End} {
		if err := Pause(ctx, time.Duration(at-shm.Now())); err != nil {
			return nil, err
		}
		u, err := c.usage(ctx)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			before = u
		} else {
			w.addUsage(before, u)
		}
	}
	for _, p := range c.Reporters {
		var r Report
		if err := p.Receive(&r); err != nil {
			return nil, err
		}
		w.addReport(&r)
	}
	return w, nil
}

// Watch runs windows until the last three agree or there were MaxWindows. After each it calls between, which may be nil.
func (c *Crowd) Watch(ctx context.Context, cfg *Config, what string, between func() error, say *progress.Line) (*Result, error) {
	var windows []*Window
	var samples []sample
	say.Say("%s: warming up", what)
	warmup := cfg.Warmup.D()
	for len(windows) < cfg.MaxWindows && (cfg.AllWindows || !stable(samples, cfg.Stability)) {
		w, err := c.Run(ctx, warmup, cfg.Duration.D())
		if err != nil && cfg.AllWindows && len(windows) > 0 {
			return Summarize(windows, stable(samples, cfg.Stability), len(windows)), err
		}
		if err != nil {
			return nil, err
		}
		windows, samples = append(windows, w), append(samples, w.sample())
		say.Say("%s: window %d, %s", what, len(windows), w)
		warmup = min(cfg.Warmup.D(), max(Rewarm, 2*time.Duration(w.sample().Latency)))
		if between == nil {
			continue
		}
		if err := between(); err != nil {
			return nil, err
		}
	}
	counted := MinWindows
	if cfg.AllWindows {
		counted = len(windows)
	}
	return Summarize(windows, stable(samples, cfg.Stability), counted), nil
}

// Rewarm is the shortest warm-up after a pause.
const Rewarm = 200 * time.Millisecond

// MinWindows must agree.
const MinWindows = 3

// String is the main figures.
func (w *Window) String() string {
	return fmt.Sprintf("%s items/s, %s ms", printable.Number(w.itemsPerS), printable.Number(w.sample().Latency/1e6))
}

// sample is a window's figures for the stability rule.
type sample struct {
	Throughput float64
	Latency    float64
}

// stable reports whether the last three windows agree: each one's throughput
// and average latency within percent of the mean of the three.
func stable(windows []sample, percent float64) bool {
	if len(windows) < MinWindows {
		return false
	}
	last := windows[len(windows)-MinWindows:]
	agree := func(of func(sample) float64) bool {
		mean := 0.0
		for _, w := range last {
			mean += of(w) / MinWindows
		}
		for _, w := range last {
			if math.Abs(of(w)-mean) > percent/100*mean {
				return false
			}
		}
		return mean > 0
	}
	return agree(func(s sample) float64 { return s.Throughput }) && agree(func(s sample) float64 { return s.Latency })
}
