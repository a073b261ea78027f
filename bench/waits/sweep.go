// SPDX-License-Identifier: Apache-2.0

package waits

import (
	"context"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tools/simulate"
)

// sweepLoads are the shares of the capacity that --sweep goes through.
var sweepLoads = []float64{0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95}

// sweepWaits are the waits that --sweep compares.
var sweepWaits = []time.Duration{policy.Auto, 0, 500 * time.Microsecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond}

// sweep is the mean latency by wait and load.
type sweep struct {
	Capacity float64     `json:"capacity"`
	Loads    []float64   `json:"loads"`
	Waits    []string    `json:"waits"`
	MeanMS   [][]float64 `json:"mean_ms"` // by wait, then by load
}

// runSweep simulates Poisson arrivals at every load with every wait.
func runSweep(ctx context.Context, seed uint64) (result, error) {
	cfg, err := sweptModel(seed)
	if err != nil {
		return nil, err
	}
	s := &sweep{Capacity: simulate.Capacity(&cfg), Loads: sweepLoads}
	for _, wait := range sweepWaits {
		name, means := wait.String(), []float64(nil)
		if wait == policy.Auto {
			name = "auto"
		}
		for _, load := range sweepLoads {
			one := cfg
			one.Policy.WaitTime, one.Arrivals = wait, simulate.Poisson{Rate: load * s.Capacity}
			r, err := simulate.Run(ctx, one)
			if err != nil {
				return nil, err
			}
			means = append(means, float64(r.Latency.Avg)/float64(time.Millisecond))
		}
		s.Waits, s.MeanMS = append(s.Waits, name), append(s.MeanMS, means)
	}
	return s, nil
}

// WriteText writes a table.
func (s *sweep) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "mean latency in ms, Poisson arrivals, capacity %s requests/s\n\n", printable.Number(s.Capacity))
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "wait_time\t")
	for _, load := range s.Loads {
		fmt.Fprintf(t, "%.0f %%\t", 100*load)
	}
	for i, wait := range s.Waits {
		fmt.Fprintf(t, "\n%s\t", wait)
		for _, mean := range s.MeanMS[i] {
			fmt.Fprintf(t, "%.2f\t", mean)
		}
	}
	fmt.Fprintln(t)
	t.Flush()
	_, err := io.WriteString(w, b.String())
	return err
}
