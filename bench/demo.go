// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/tools/load"
)

// demoReport is the JSON of the demo, which prints three lines and one sentence.
type demoReport struct {
	Suite  string       `json:"suite"`
	Config *load.Config `json:"config"`
	Note   string       `json:"note,omitempty"`
	Lines  []demoLine   `json:"lines"`
}

type demoLine struct {
	Name string `json:"name"`
	*load.Result
}

const (
	demoDuration  = 600 * time.Millisecond
	demoWarmup    = 400 * time.Millisecond
	demoWindows   = 4
	demoProducers = 32
)

// The lines, in order.
const (
	_ = iota // alone
	demoEach
	demoBatched
	demoLines
)

func runDemo(ctx context.Context, cfg *config, say *progress.Line) (*demoReport, error) {
	r := &demoReport{Suite: "demo", Config: &cfg.Config, Note: cfg.note()}
	f, err := newFleet(ctx)
	if err != nil {
		return r, err
	}
	defer f.Close()
	bound, err := f.startBound(cfg, say)
	if err != nil {
		return r, err
	}
	n := cfg.WorkerNum
	for _, l := range []struct {
		name string
		run  func() (*load.Result, error)
	}{
		{"one process alone", func() (*load.Result, error) { return f.alone(cfg, 1, 1, nil, say) }},
		{fmt.Sprintf("%d processes, each on its own", n), func() (*load.Result, error) { return f.alone(cfg, n, 1, nil, say) }},
		{fmt.Sprintf("%d processes through ringbatch", n), func() (*load.Result, error) { return f.measureOnce(cfg, bound, say) }},
	} {
		res, err := l.run()
		if err != nil {
			return r, fmt.Errorf("%s: %w", l.name, err)
		}
		r.Lines = append(r.Lines, demoLine{l.name, res})
	}
	return r, nil
}

func (r *demoReport) Print(w io.Writer) {
	if r.Note != "" {
		fmt.Fprintf(w, "note: %s\n", r.Note)
	}
	fmt.Fprintf(w, "\n%-36s %10s %12s\n", "", "items/s", "latency")
	for _, l := range r.Lines {
		batches := ""
		if size := math.Round(l.BatchSize.Avg); size > 1 {
			batches = fmt.Sprintf("   in batches of %.0f", size)
		}
		fmt.Fprintf(w, "%-36s %10s %9s ms%s\n", l.Name, printable.Number(round(l.ItemsPerS)), twoDigits(round(l.Latency.Avg)), batches)
	}
	if s := r.sentence(); s != "" {
		fmt.Fprintf(w, "\n%s\n", s)
	}
	if others := r.others(); others >= load.BusyPercent {
		fmt.Fprintf(w, "Other programs used up to %.0f %% of this machine meanwhile.\n", others)
	}
}

// others is the most that other programs used during a line.
func (r *demoReport) others() (most float64) {
	for _, l := range r.Lines {
		most = max(most, l.OtherCPU)
	}
	return most
}

// round keeps two digits: a demo of seconds has no more.
func round(v float64) float64 {
	if v <= 0 {
		return 0
	}
	unit := math.Pow(10, math.Floor(math.Log10(v))-1)
	return math.Round(v/unit) * unit
}

// twoDigits prints a rounded figure without trailing zeros.
func twoDigits(v float64) string {
	after := max(0, 1-int(math.Floor(math.Log10(max(v, 1e-9)))))
	s := strconv.FormatFloat(v, 'f', after, 64)
	if after > 0 {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return s
}

// sentence compares batching with processes on their own.
func (r *demoReport) sentence() string {
	if len(r.Lines) < demoLines {
		return ""
	}
	each, batched := r.Lines[demoEach].Result, r.Lines[demoBatched].Result
	note := ""
	if r.Note != "" {
		note = " (simulated)"
	}
	share := "all" // more than the bound is noise of the machine
	if batched.RatioToBound < 0.995 {
		share = fmt.Sprintf("%.0f %%", 100*batched.RatioToBound)
	}
	return fmt.Sprintf("Batched, the same %d processes did %s times the work at %s of the latency: %s of what the model can do%s.",
		r.Config.WorkerNum, twoDigits(round(batched.ItemsPerS/each.ItemsPerS)), fraction(batched.Latency.Avg/each.Latency.Avg), share, note)
}

func fraction(v float64) string {
	if v < 0.67 {
		return fmt.Sprintf("1/%.0f", 1/v)
	}
	return fmt.Sprintf("%.1f times", v)
}
