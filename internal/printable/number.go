// SPDX-License-Identifier: Apache-2.0

package printable

import (
	"math"
	"strconv"
	"strings"
)

// Number writes x with three significant digits, or as a whole number with its thousands apart.
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
