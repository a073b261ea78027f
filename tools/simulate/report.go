// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/printable"
)

// WriteText writes the result for a terminal.
func (r *Result) WriteText(w io.Writer) error {
	var b strings.Builder
	cfg := r.cfg
	fmt.Fprintf(&b, "%s\n%s\n\n", cfg.Arrivals, cfg.describe())
	fmt.Fprintf(&b, "throughput  %s requests/s, %s rows/s, over %v\n",
		printable.Number(r.RequestsPerSecond), printable.Number(r.RowsPerSecond), r.Span.Round(time.Millisecond))
	l := &r.Latency
	fmt.Fprintf(&b, "latency     avg %s  p50 %s  p90 %s  p95 %s  p99 %s  p99.9 %s  max %s\n",
		short(l.Avg), short(l.P50), short(l.P90), short(l.P95), short(l.P99), short(l.P999), short(l.Max))
	for i, level := range r.Levels {
		l := &level.Latency
		fmt.Fprintf(&b, "  level %-3d avg %s  p50 %s  p99 %s  max %s  (%s completed)\n",
			i, short(l.Avg), short(l.P50), short(l.P99), short(l.Max), count(level.Completed))
	}
	o := &r.Outcomes
	fmt.Fprintf(&b, "requests    %s completed%s%s%s%s\n", count(o.Completed),
		some(o.Late, "late"), some(o.Expired, "expired"), some(o.TimedOut, "timed out"), some(o.Refused, "refused"))
	tokens := ""
	if r.MeanBatchTokens > 0 {
		tokens = fmt.Sprintf(" and %s tokens", printable.Number(r.MeanBatchTokens))
	}
	fmt.Fprintf(&b, "batches     %s of %.1f rows%s on average%s%s%s%s\n", count(r.Batches), r.MeanBatchRows, tokens,
		share(r.Reasons.Full, r.Batches, "full"), share(r.Reasons.Preferred, r.Batches, "preferred size"),
		share(r.Reasons.Deadline, r.Batches, "wait time over"), share(r.Reasons.Nobody, r.Batches, "nobody left"))
	if r.Rounds > 0 {
		fmt.Fprintf(&b, "rounds      %s of %.1f rows on average\n", count(r.Rounds), r.MeanRoundRows)
	}
	b.WriteString("workers    ")
	for i, x := range r.Workers {
		if i == 8 {
			fmt.Fprintf(&b, " … %d in all", len(r.Workers))
			break
		}
		fmt.Fprintf(&b, " %.1f %%", 100*x.Utilisation)
	}
	b.WriteString(" busy\n")
	if r.Whole != nil {
		b.WriteString("\n" + r.Whole.summary(cfg.Workers.Lanes))
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (c *Config) describe() string {
	var b strings.Builder
	fmt.Fprintf(&b, "max_batch_size %d, wait_time %s", c.Policy.MaxBatchSize, c.Policy.Policy(nil)["wait_time"])
	if c.Policy.MaxBatchCost > 0 {
		fmt.Fprintf(&b, ", max_batch_cost %d", c.Policy.MaxBatchCost)
	}
	if len(c.Policy.PreferredBatchSizes) > 0 {
		fmt.Fprintf(&b, ", preferred_batch_sizes %v", c.Policy.PreferredBatchSizes)
	}
	if len(c.Policy.Levels) > 1 {
		fmt.Fprintf(&b, ", %d levels", len(c.Policy.Levels))
	}
	if c.Policy.Ageing > 0 {
		fmt.Fprintf(&b, ", ageing %v", c.Policy.Ageing)
	}
	if c.Policy.PreserveOrder {
		b.WriteString(", preserve_order")
	}
	of := "batch"
	if c.Rounds != nil {
		of = "round"
	}
	fmt.Fprintf(&b, "; workers %d, %s cost %s, hop %v", c.Workers.Count, of, c.Cost.summary(), c.Hop)
	if c.Workers.Lanes > 0 {
		fmt.Fprintf(&b, ", %d lanes", c.Workers.Lanes)
	}
	return b.String()
}

// summary is the cost in a few words.
func (c Cost) summary() string {
	if len(c) <= 4 {
		return c.String()
	}
	return fmt.Sprintf("%s … %s (%d points)", c[:1], c[len(c)-1:], len(c))
}

// short writes three significant digits.
func short(d time.Duration) string {
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond} {
		if d >= 100*unit {
			return d.Round(unit).String()
		}
		if d >= 10*unit {
			return d.Round(unit / 10).String()
		}
		if d >= unit {
			return d.Round(unit / 100).String()
		}
	}
	return d.String()
}

func count(n int) string { return printable.Number(float64(n)) }

func some(n int, what string) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(", %s %s", count(n), what)
}

func share(n, of int, what string) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(", %.1f %% %s", 100*float64(n)/float64(of), what)
}
