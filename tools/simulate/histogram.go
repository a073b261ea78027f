// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"math"
	"sort"
	"strings"
	"time"
	"unicode/utf8"
)

// bin is one line of a histogram.
type bin struct {
	label string
	n     int
	rows  int // of the batches in it
}

// sizeBins puts batch sizes into at most n bins of equal width.
func sizeBins(sizes []SizeCount, n int) []bin {
	if len(sizes) == 0 {
		return nil
	}
	low, high := sizes[0].Rows, sizes[len(sizes)-1].Rows
	width := (high - low + n) / n
	bins := make([]bin, (high-low)/width+1)
	for i := range bins {
		first := low + i*width
		last := min(first+width-1, high)
		bins[i].label = fmt.Sprint(first)
		if last > first {
			bins[i].label = fmt.Sprintf("%d-%d", first, last)
		}
	}
	for _, s := range sizes {
		x := &bins[(s.Rows-low)/width]
		x.n += s.Batches
		x.rows += s.Rows * s.Batches
	}
	return bins
}

// latencyBins puts latencies into at most n bins, 1, 2 or 5 times a power of ten wide, the last one open.
func (r *Result) latencyBins(n int) []bin {
	if len(r.latencies) == 0 {
		return nil
	}
	low := r.Quantile(0)
	high := max(r.Quantile(0.999), low+1)
	width := niceWidth(float64(high-low) / float64(n-2))
	first := low / width * width
	var bins []bin
	for from, at := first, 0; at < len(r.latencies); from += width {
		to := from + width
		b := bin{label: fmt.Sprintf("%v - %v", from, to)}
		next := sort.Search(len(r.latencies), func(i int) bool { return r.latencies[i] >= int64(to) })
		if len(bins) == n-1 {
			b.label = fmt.Sprintf("over %v", from)
			next = len(r.latencies)
		}
		b.n = next - at
		at = next
		bins = append(bins, b)
	}
	return bins
}

// niceWidth is the smallest of 1, 2 or 5 times a power of ten nanoseconds ≥ x.
func niceWidth(x float64) time.Duration {
	power := math.Pow(10, math.Floor(math.Log10(max(x, 1))))
	for _, m := range []float64{1, 2, 5} {
		if m*power >= x {
			return time.Duration(m * power)
		}
	}
	return time.Duration(10 * power)
}

const histogramWidth = 40

// writeHistogram draws bins as bars.
func writeHistogram(b *strings.Builder, title string, bins []bin) {
	most, total, wide := 1, 0, utf8.RuneCountInString(title)
	for _, x := range bins {
		most = max(most, x.n)
		total += x.n
		wide = max(wide, utf8.RuneCountInString(x.label))
	}
	fmt.Fprintf(b, "%*s\n", wide, title)
	for _, x := range bins {
		bar := strings.Repeat("█", (histogramWidth*x.n+most-1)/most)
		fmt.Fprintf(b, "%*s │%-*s %5.1f %%\n", wide, x.label, histogramWidth, bar, 100*float64(x.n)/float64(max(1, total)))
	}
}
