// SPDX-License-Identifier: Apache-2.0

package top

// A table of texts. What does not fit is left out column by column, the least
// important first.

type column struct {
	title string
	left  bool
	least int // columns that it takes at least, so that it does not jump about
	rank  int // the higher, the sooner it is left out; 0 never is
}

type row struct {
	style style
	cells []string
	more  func(l *line) // what comes after the cells
}

// table lays out rows in at most so many columns, and returns the title line
// and theirs. spare is how much room is left beside them, for row.more.
func table(most int, cols []column, rows []row) (title *line, lines []*line, spare int) {
	const gap, leastFirst = 2, 8
	widths := make([]int, len(cols))
	total := -gap
	for i, c := range cols {
		widths[i] = max(columns(c.title), c.least)
		for _, r := range rows {
			widths[i] = max(widths[i], columns(r.cells[i]))
		}
		total += widths[i] + gap
	}
	shown := make([]bool, len(cols))
	for i := range shown {
		shown[i] = true
	}
	shrink := func(least int) { // the first column, a name, which is cut
		by := min(max(0, total-most), max(0, widths[0]-least))
		widths[0] -= by
		total -= by
	}
	shrink(max(leastFirst, most/3))
	for total > most {
		last := 0
		for i, c := range cols {
			if shown[i] && c.rank > cols[last].rank {
				last = i
			}
		}
		if last == 0 {
			break
		}
		shown[last] = false
		total -= widths[last] + gap
	}
	shrink(1)

	write := func(s style, cell func(i int) string) *line {
		l := newLine(most)
		for i := range cols {
			if !shown[i] {
				continue
			}
			if i > 0 {
				l.add(s, "  ")
			}
			l.add(s, pad(cell(i), widths[i], cols[i].left))
		}
		return l
	}
	title = write(dim, func(i int) string { return cols[i].title })
	for _, r := range rows {
		l := write(r.style, func(i int) string { return r.cells[i] })
		if r.more != nil {
			r.more(l)
		}
		if r.style == chosen {
			l.fill(chosen, most)
		}
		lines = append(lines, l)
	}
	return title, lines, most - total
}
