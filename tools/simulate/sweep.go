// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tools/svgchart"
)

// sweepLoads are the shares of the capacity that --sweep goes through.
var sweepLoads = []float64{0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95}

// sweepWaits are the waits that --sweep compares.
var sweepWaits = []time.Duration{policy.Auto, 0, 500 * time.Microsecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond}

func waitName(wait time.Duration) string {
	if wait == policy.Auto {
		return "auto"
	}
	return wait.String()
}

// sweep is the mean latency by wait and load, in milliseconds.
type sweep struct {
	cfg      *Config
	capacity float64
	mean     [][]float64 // by sweepWaits, sweepLoads
}

// runSweep simulates Poisson arrivals at every load with every wait.
func runSweep(ctx context.Context, cfg Config) (*sweep, error) {
	s := &sweep{cfg: &cfg, capacity: capacity(&cfg)}
	for _, wait := range sweepWaits {
		var line []float64
		for _, load := range sweepLoads {
			one := cfg
			one.Policy.WaitTime = wait
			one.Arrivals = Poisson{Rate: load * s.capacity}
			r, err := Run(ctx, one)
			if err != nil {
				return nil, err
			}
			line = append(line, milliseconds(r.Latency.Avg))
		}
		s.mean = append(s.mean, line)
	}
	return s, nil
}

// WriteText writes a table.
func (s *sweep) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "mean latency in ms, Poisson arrivals, capacity %s requests/s; %s\n\n", svgchart.Number(s.capacity), s.cfg.describe())
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "wait_time\t")
	for _, load := range sweepLoads {
		fmt.Fprintf(t, "%.0f %%\t", 100*load)
	}
	for i, wait := range sweepWaits {
		fmt.Fprintf(t, "\n%s\t", waitName(wait))
		for _, mean := range s.mean[i] {
			fmt.Fprintf(t, "%.2f\t", mean)
		}
	}
	fmt.Fprintln(t)
	t.Flush()
	_, err := io.WriteString(w, b.String())
	return err
}

// plot draws the sweep into a file.
func (s *sweep) plot(name string) error {
	c := svgchart.Chart{Title: "Mean latency against load", XLabel: "load (share of the capacity)", YLabel: "mean latency (ms)"}
	for i, wait := range sweepWaits {
		c.Lines = append(c.Lines, svgchart.Line{Name: waitName(wait), X: sweepLoads, Y: s.mean[i], Dashed: wait != policy.Auto})
	}
	figure := svgchart.Figure{Title: "wait_time auto and fixed", Subtitle: s.cfg.describe(), Charts: []svgchart.Chart{c}}
	return writeFile(name, figure.Render)
}

func (c *Command) runSweep(ctx context.Context, stdout io.Writer) error {
	unused := []string{"arrivals", "rate", "on", "off", "clients", "in-flight", "think", "trace", "wait-time", "json"}
	if err := c.rejectUnused("--sweep", func(flag string) bool { return !slices.Contains(unused, flag) }); err != nil {
		return err
	}
	cfg, err := c.config()
	if err != nil {
		return err
	}
	s, err := runSweep(ctx, cfg)
	if err != nil {
		return err
	}
	var undrawn error
	if c.svg != "" {
		undrawn = s.plot(c.svg)
	}
	return errors.Join(undrawn, s.WriteText(stdout))
}
