// SPDX-License-Identifier: Apache-2.0

package svgchart

import (
	"math"
	"strconv"
	"strings"
)

// scale maps numbers to pixels.
type scale struct {
	min, max    float64 // of the axis
	from, to    float64 // pixels
	logarithmic bool
}

func (s scale) at(x float64) float64 {
	lo, hi := s.min, s.max
	if s.logarithmic {
		x, lo, hi = math.Log10(x), math.Log10(lo), math.Log10(hi)
	}
	if hi == lo {
		return (s.from + s.to) / 2
	}
	return s.from + (x-lo)/(hi-lo)*(s.to-s.from)
}

// linear makes an axis from min to max, rounded outwards to about n ticks.
func linear(min, max float64, n int) (lo, hi float64, ticks []float64) {
	if max <= min {
		max = min + 1
	}
	step := niceStep((max - min) / float64(n))
	lo = math.Floor(min/step+1e-9) * step
	hi = math.Ceil(max/step-1e-9) * step
	for i := 0; ; i++ {
		t := lo + float64(i)*step
		if t > hi+step/2 {
			return lo, hi, ticks
		}
		ticks = append(ticks, t)
	}
}

// niceStep is the smallest of 1, 2 or 5 times a power of ten that is ≥ x.
func niceStep(x float64) float64 {
	power := math.Pow(10, math.Floor(math.Log10(x)))
	for _, m := range []float64{1, 2, 5} {
		if m*power >= x*(1-1e-9) {
			return m * power
		}
	}
	return 10 * power
}

// logSteps are the multiples of powers of ten at which an axis from min to max has ticks. A
// short axis has more.
func logSteps(min, max float64) []float64 {
	switch decades := math.Log10(max / min); {
	case decades < 1.3:
		return []float64{1, 2, 3, 4, 5, 6, 8}
	case decades < 4:
		return []float64{1, 2, 5}
	}
	return []float64{1}
}

// logarithmic makes an axis from min to max, widened to the next tick on both sides.
func logarithmic(min, max float64) (lo, hi float64, ticks []float64) {
	if min == max {
		min, max = min/2, max*2
	}
	steps := logSteps(min, max)
	const slack = 1 + 1e-9 // for rounding errors
	for e := math.Floor(math.Log10(min)); ; e++ {
		for _, m := range steps {
			t := m * math.Pow(10, e)
			if t <= min*slack {
				ticks = ticks[:0]
			}
			ticks = append(ticks, t)
			if t*slack >= max {
				return ticks[0], t, ticks
			}
		}
	}
}

// Number writes x with up to three significant digits and commas between thousands: 0.25,
// 3, 12,500.
func Number(x float64) string {
	digits := 0
	if a := math.Abs(x); a != 0 && a < 100 {
		digits = int(math.Max(0, 2-math.Floor(math.Log10(a))))
	}
	text := strconv.FormatFloat(x, 'f', digits, 64)
	whole, fraction, found := strings.Cut(text, ".")
	if found {
		fraction = strings.TrimRight(fraction, "0")
	}
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "-", whole[1:]
	}
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	return sign + whole
}

// Percent writes a share of one: 0.25 is 25 %.
func Percent(x float64) string { return Number(100*x) + " %" }
