// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/internal/printable"
)

// WriteCost writes the CSV file that `ringbatch simulate --cost` reads.
func (p *Profile) WriteCost(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s: %d worker(s), max_batch_size %d; the median batch and its 95 %% interval\n", p.Model, p.Workers, p.MaxBatchSize)
	b.WriteString("# for: ringbatch simulate --cost THIS_FILE\n")
	b.WriteString("# rows,seconds,busy workers,low,high,batches\n")
	for _, x := range p.Points {
		fmt.Fprintf(&b, "%d,%.9f,%d,%.9f,%.9f,%d\n", x.Rows, x.MS/1e3, x.Busy, x.Low/1e3, x.High/1e3, x.Batches)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

const barWidth = 32

// WriteText writes a table with bars, the verdict and the notes.
func (p *Profile) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d worker(s), max_batch_size %d; time of a batch in the worker, median and its 95 %% interval (order "+
		"statistics)\n", p.Model, p.Workers, p.MaxBatchSize)
	if p.Unfinished {
		b.WriteString("interrupted: this is what was measured until then\n")
	}
	longest := 0.0
	for _, x := range p.Points {
		longest = max(longest, x.MS)
	}
	busy := 0
	for _, x := range p.Points {
		if x.Busy != busy {
			busy = x.Busy
			fmt.Fprintf(&b, "\n%s\n%6s %9s %21s %9s %8s\n", busyText(busy), "rows", "ms", "95 % of the median", "rows/s", "batches")
		}
		fmt.Fprintf(&b, "%6d %9s %21s %9s %8d  %s\n", x.Rows, printable.Number(x.MS), printable.Number(x.Low)+" … "+printable.Number(x.High),
			printable.Number(float64(x.Rows)/x.MS*1e3), x.Batches, strings.Repeat("█", max(1, int(x.MS/longest*barWidth+0.5))))
	}
	fmt.Fprintf(&b, "\n%s\n", p.Verdict())
	for _, note := range p.Notes() {
		fmt.Fprintf(&b, "note: %s\n", note)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Notes are sentences about lost workers and missing kinds.
func (p *Profile) Notes() (notes []string) {
	if p.Lost > 0 {
		notes = append(notes, fmt.Sprintf("%d worker(s) left or died while it was measured", p.Lost))
	}
	for i := 0; i < len(p.Missing); { // one for each number of workers
		busy, rows := p.Missing[i].Busy, ""
		for ; i < len(p.Missing) && p.Missing[i].Busy == busy; i++ {
			rows += fmt.Sprintf(", %d", p.Missing[i].Rows)
		}
		notes = append(notes, fmt.Sprintf("batches of %s rows were hardly ever seen with %d workers busy at once: they are too quick, "+
			"or a worker was missing", rows[2:], busy))
	}
	return notes
}

func busyText(busy int) string {
	if busy == 1 {
		return "one worker busy"
	}
	return fmt.Sprintf("%d workers busy", busy)
}

// find is the point of a kind, or nil.
func (p *Profile) find(rows, busy int) *Point {
	for i := range p.Points {
		if x := &p.Points[i]; x.Rows == rows && x.Busy == busy {
			return x
		}
	}
	return nil
}

// pays is the least gain for which the verdict says that batching pays.
const pays = 1.1

// Verdict says in a sentence whether batching pays, and in another how much busy workers
// slow each other down.
func (p *Profile) Verdict() string {
	var least, best *Point // rows, and the most rows a second
	for i := range p.Points {
		x := &p.Points[i]
		if x.Busy != 1 {
			continue
		}
		if least == nil || x.Rows < least.Rows {
			least = x
		}
		if best == nil || float64(x.Rows)/x.MS > float64(best.Rows)/best.MS {
			best = x
		}
	}
	if least == nil {
		return "Too little was measured to say whether batching pays."
	}
	gain := float64(best.Rows) / best.MS * least.MS / float64(least.Rows)
	text := fmt.Sprintf("Batching hardly pays: in batches of %d a worker does %.2f × as much as with %s at a time", best.Rows, gain,
		rowsText(least.Rows))
	if least.Rows == 1 {
		text += "; max_batch_size = 1 loses little"
	}
	text += "."
	if gain >= pays {
		text = fmt.Sprintf("Batching pays: %d rows take %.2f × as long as %s, so in batches of %d a worker does %.1f × as much.", best.Rows,
			best.MS/least.MS, rowsText(least.Rows), best.Rows, gain)
	}
	most := p.Points[len(p.Points)-1].Busy
	if full := p.find(best.Rows, most); most > 1 && full != nil {
		text += fmt.Sprintf("\nWith %d workers busy such a batch takes %.2f × as long: together they do %.2f × as much as one.", most,
			full.MS/best.MS, float64(most)*best.MS/full.MS)
	}
	return text
}

func rowsText(n int) string {
	if n == 1 {
		return "one"
	}
	return fmt.Sprintf("%d", n)
}

// medianInterval is the median and its 95 % interval by order statistics. Whatever the
// distribution, the interval from the r-th smallest to the r-th largest value has the
// true median unless fewer than r of n fair coins show heads, or tails. Below six values
// the interval is the whole range, which is less certain.
func medianInterval(values []float64) (median, low, high float64) {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	median = (v[(n-1)/2] + v[n/2]) / 2
	r := medianRank(n)
	return median, v[r], v[n-1-r]
}

// medianRank is the largest r, counted from 0, for which the probability of at most r heads
// among n coins is at most 2.5 %, or 0.
func medianRank(n int) int {
	if n > 1000 { // the binomial is a normal distribution by then
		return int(float64(n)/2 - 1.96*math.Sqrt(float64(n))/2 - 1)
	}
	r, sum := 0, 0.0
	for p := math.Exp2(-float64(n)); sum+p <= 0.025; r++ { // p: exactly r heads
		sum += p
		p = p * float64(n-r) / float64(r+1)
	}
	return max(0, r-1)
}
