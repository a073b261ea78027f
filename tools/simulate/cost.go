// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Cost is the measured time of a batch by its rows: points, ascending in rows, with straight lines
// between them. Below the first point it is constant; beyond the last it has the slope of the last two.
type Cost []CostPoint

// maxCost of a batch, so that a slope times policy.MaxRows is a time.
const maxCost = time.Hour

func (c Cost) validate() error {
	if len(c) == 0 {
		return bad("no cost of the model is given")
	}
	for _, p := range c {
		if p.Rows < 1 || p.Time <= 0 || p.Time > maxCost {
			return bad("the cost of %d rows is %v, must be above 0 and at most %v", p.Rows, p.Time, maxCost)
		}
	}
	return nil
}

// CostPoint is one measurement.
type CostPoint struct {
	Rows int
	Time time.Duration
}

// Of is the time of a batch of rows rows.
func (c Cost) Of(rows int) time.Duration {
	i, exact := slices.BinarySearchFunc(c, rows, func(p CostPoint, rows int) int { return cmp.Compare(p.Rows, rows) })
	switch {
	case exact:
		return c[i].Time
	case i == 0:
		return c[0].Time
	case i == len(c) && len(c) == 1:
		return c[0].Time * time.Duration(rows) / time.Duration(c[0].Rows)
	case i == len(c):
		i--
	}
	a, b := c[i-1], c[i]
	slope := float64(b.Time-a.Time) / float64(b.Rows-a.Rows)
	return max(0, a.Time+time.Duration(slope*float64(rows-a.Rows)))
}

// ParseCost reads points like "1=3.3ms,32=8.2ms".
func ParseCost(text string) (Cost, error) {
	var c Cost
	for _, point := range strings.Split(text, ",") {
		rows, duration, found := strings.Cut(strings.TrimSpace(point), "=")
		if !found {
			return nil, bad("cost point %q is not like 32=8.2ms", point)
		}
		p, err := parsePoint(rows, duration)
		if err != nil {
			return nil, err
		}
		c = append(c, p)
	}
	return c.sorted()
}

// ReadCosts reads a CSV file of rows, the time of a batch, as a duration (8.2ms) or in seconds, and
// optionally the number of busy workers, this one included. It ignores further columns, column names
// in the first line, empty lines and lines that start with #. busy is the cost with 1, 2 … other
// workers busy; empty if the file has no such column.
func ReadCosts(r io.Reader) (alone Cost, busy []Cost, err error) {
	byBusy := map[int]Cost{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Split(line, ",")
		if len(fields) < 2 {
			return nil, nil, bad("cost file, line %d: %q is not rows,time", n, line)
		}
		if n == 1 && isName(fields[0]) {
			continue // column names
		}
		p, err := parsePoint(fields[0], fields[1])
		if err != nil {
			return nil, nil, fmt.Errorf("cost file, line %d: %w", n, err)
		}
		k := 1
		if len(fields) > 2 {
			if k, err = strconv.Atoi(strings.TrimSpace(fields[2])); err != nil || k < 1 || k > maxWorkers {
				return nil, nil, bad("cost file, line %d: %q is not a number of busy workers", n, fields[2])
			}
		}
		byBusy[k] = append(byBusy[k], p)
	}
	if err := lines.Err(); err != nil {
		return nil, nil, fmt.Errorf("read cost file: %w", err)
	}
	return costsOf(byBusy)
}

// isName says whether a field is not a number, but the name of a column.
func isName(field string) bool {
	_, err := strconv.ParseFloat(strings.TrimSpace(field), 64)
	return err != nil
}

// costsOf orders costs by the number of busy workers. Numbers that were not measured lie between their neighbours.
func costsOf(byBusy map[int]Cost) (alone Cost, busy []Cost, err error) {
	most := 0
	for k, c := range byBusy {
		if byBusy[k], err = c.sorted(); err != nil {
			return nil, nil, err
		}
		most = max(most, k)
	}
	if len(byBusy[1]) == 0 {
		return nil, nil, bad("the cost has no points with one busy worker")
	}
	for k, c := range byBusy {
		if k > 1 {
			byBusy[k] = c.reaching(byBusy[1])
		}
	}
	last := 1
	for k := 2; k <= most; k++ {
		c := byBusy[k]
		if c == nil {
			next := k
			for byBusy[next] == nil {
				next++
			}
			share := float64(k-last) / float64(next-last)
			for _, p := range byBusy[last] {
				p.Time += time.Duration(share * float64(byBusy[next].Of(p.Rows)-p.Time))
				c = append(c, p)
			}
		}
		byBusy[k] = c
		last = k
		busy = append(busy, c)
	}
	return byBusy[1], busy, nil
}

// reaching adds the sizes that were measured alone only, if they lie beyond the sizes that were
// measured beside busy workers. Each is slowed down as the nearest measured size is: a straight line
// through few points would be far off.
func (c Cost) reaching(alone Cost) Cost {
	first, last := c[0], c[len(c)-1]
	all := slices.Clone(c)
	for _, p := range alone {
		nearest := first
		if p.Rows > first.Rows {
			nearest = last
		}
		if p.Rows < first.Rows || p.Rows > last.Rows {
			slowdown := float64(nearest.Time) / max(1, float64(alone.Of(nearest.Rows)))
			all = append(all, CostPoint{p.Rows, time.Duration(slowdown * float64(p.Time))})
		}
	}
	slices.SortFunc(all, func(a, b CostPoint) int { return cmp.Compare(a.Rows, b.Rows) })
	return all
}

// took is the time of a batch of rows rows that starts while others other workers are busy.
func (c *Config) took(rows, others int) float64 {
	alone := float64(c.Cost.Of(rows))
	n := len(c.Busy)
	switch {
	case others == 0:
		return alone
	case n == 0:
		return alone * (1 + c.Workers.Sharing*float64(others))
	case others <= n:
		return float64(c.Busy[others-1].Of(rows))
	}
	// Each further worker adds as much as the measured ones did on average.
	return max(alone, alone+(float64(c.Busy[n-1].Of(rows))-alone)*float64(others)/float64(n))
}

func parsePoint(rowsText, timeText string) (p CostPoint, err error) {
	if p.Rows, err = strconv.Atoi(strings.TrimSpace(rowsText)); err != nil || p.Rows < 1 {
		return p, bad("batch size %q is not a number of rows", rowsText)
	}
	if p.Time, err = parseTime(strings.TrimSpace(timeText)); err != nil || p.Time <= 0 {
		return p, bad("batch time %q is not a duration like 8.2ms", timeText)
	}
	return p, nil
}

// parseTime reads a duration with a unit, or a number of seconds.
func parseTime(text string) (time.Duration, error) {
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		if !(seconds >= 0 && seconds < 1e9) {
			return 0, bad("%q is not a time in seconds", text)
		}
		return time.Duration(seconds * float64(time.Second)), nil
	}
	d, err := time.ParseDuration(text)
	if err == nil && (d < 0 || d >= 1e9*time.Second) {
		return 0, bad("%q is out of range", text)
	}
	return d, err
}

func (c Cost) sorted() (Cost, error) {
	if len(c) == 0 {
		return nil, bad("the cost has no points")
	}
	slices.SortFunc(c, func(a, b CostPoint) int { return cmp.Compare(a.Rows, b.Rows) })
	for i := 1; i < len(c); i++ {
		if c[i].Rows == c[i-1].Rows {
			return nil, bad("the cost has two times for %d rows", c[i].Rows)
		}
	}
	return c, nil
}

func (c Cost) String() string {
	var points []string
	for _, p := range c {
		points = append(points, fmt.Sprintf("%d=%v", p.Rows, p.Time))
	}
	return strings.Join(points, ",")
}
