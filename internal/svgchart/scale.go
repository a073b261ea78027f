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

// logTicks are 1, 2 and 5 times powers of ten in min..max, or the powers alone
// when there are many.
func logTicks(min, max float64) (ticks []float64) {
	steps := []float64{1, 2, 5}
	if math.Log10(max/min) > 4 {
		steps = steps[:1]
	}
	for e := math.Floor(math.Log10(min)); e <= math.Log10(max); e++ {
		for _, m := range steps {
			if t := m * math.Pow(10, e); t >= min*(1-1e-9) && t <= max*(1+1e-9) {
				ticks = append(ticks, t)
			}
		}
	}
	return ticks
}

// logRange widens min..max to the next tick on either side.
func logRange(min, max float64) (lo, hi float64) {
	if min == max {
		return min / 2, max * 2
	}
	down := func(x float64) float64 {
		power := math.Pow(10, math.Floor(math.Log10(x)+1e-9))
		for _, m := range []float64{5, 2} {
			if m*power <= x*(1+1e-9) {
				return m * power
			}
		}
		return power
	}
	return down(min), niceStep(max)
}

// Number writes x with up to three significant decimals and thousands set
// apart: 0.25, 3, 12,500.
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
