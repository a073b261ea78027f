// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/printable"
)

// view is the state of the screen. Only answers of the broker and keys change it.
type view struct {
	socket, only string
	now          *stats.Broker // nil until the first answer
	at           time.Time     // of that answer
	err          error         // of the last question
	sort         int           // the column to sort by
}

const windowSeconds = 10

// take keeps the last answer on the screen while the broker does not answer.
func (v *view) take(a answer, at time.Time) {
	if v.err = a.err; a.err == nil {
		v.now, v.at = a.stats, at
	}
}

// columns of the table of models. Numbers sort the largest first.
var columns = []struct {
	title, format string
	value         func(m *stats.Model, w *stats.Window) float64
}{
	{title: "model"},
	{"req/s", "%.1f", func(_ *stats.Model, w *stats.Window) float64 { return w.RequestsPerS }},
	{"rows/s", "%.1f", func(_ *stats.Model, w *stats.Window) float64 { return w.RowsPerS }},
	{"p50 ms", "%.2f", func(_ *stats.Model, w *stats.Window) float64 { return w.Latency.P50 }},
	{"p99 ms", "%.2f", func(_ *stats.Model, w *stats.Window) float64 { return w.Latency.P99 }},
	{"rows/batch", "%.2f", func(_ *stats.Model, w *stats.Window) float64 { return w.RowsPerBatch }},
	{"busy", "%.0f%%", func(_ *stats.Model, w *stats.Window) float64 { return 100 * w.Busy }},
	{"queue", "%.0f", func(m *stats.Model, _ *stats.Window) float64 { return float64(m.QueueLength) }},
	{"ring", "%.0f%%", func(m *stats.Model, _ *stats.Window) float64 {
		return 100 * float64(m.SlotsQueued+m.SlotsRunning+m.SlotsHeld) / float64(max(1, m.Slots))
	}},
	{"failed/s", "%.2f", func(_ *stats.Model, w *stats.Window) float64 { return w.FailedPerS }},
	{"workers", "%.0f", func(m *stats.Model, _ *stats.Window) float64 { return float64(m.ReadyWorkers) }},
	{"clients", "%.0f", func(m *stats.Model, _ *stats.Window) float64 { return float64(m.Clients) }},
}

// draw returns exactly height lines, none wider than width. Rows that have no room are left out.
func (v *view) draw(width, height int) []string {
	lines := []string{"ringbatch  " + v.socket}
	if v.now != nil {
		lines[0] = fmt.Sprintf("ringbatch  broker pid %d, up %s%s  %s  last %d s", v.now.Pid, time.Duration(v.now.UptimeS)*time.Second,
			map[bool]string{true: ", draining"}[v.now.Draining], v.socket, windowSeconds)
	}
	switch {
	case v.err != nil && v.now != nil:
		lines = append(lines, fmt.Sprintf("no answer since %s, trying again: %v", v.at.Format(time.TimeOnly), v.err))
	case v.err != nil:
		lines = append(lines, fmt.Sprintf("no answer from the broker; trying again: %v", v.err))
	}
	if v.now != nil {
		lines = append(lines, "")
		lines = append(lines, v.modelTable()...)
		lines = append(lines, "")
		lines = append(lines, v.workerTable()...)
	}
	for len(lines) < height-1 {
		lines = append(lines, "")
	}
	lines = append(lines[:max(0, height-1)], "q quit   s sort: "+columns[v.sort].title)
	for i, l := range lines {
		lines[i] = cut(printable.Text(l, 4096), width)
	}
	return lines
}

func (v *view) modelTable() []string {
	type entry struct {
		model  *stats.Model
		window stats.Window
	}
	var models []entry
	for i := range v.now.Models {
		if m := &v.now.Models[i]; v.only == "" || m.Name == v.only {
			models = append(models, entry{m, m.Window(windowSeconds)})
		}
	}
	if len(models) == 0 {
		return []string{"no models yet: start a worker, or declare one with --config or --model"}
	}
	slices.SortStableFunc(models, func(a, b entry) int {
		c := strings.Compare(a.model.Name, b.model.Name)
		if value := columns[v.sort].value; value != nil {
			c = cmp.Or(cmp.Compare(value(b.model, &b.window), value(a.model, &a.window)), c)
		}
		return c
	})
	rows := [][]string{nil}
	for i, c := range columns {
		title := c.title
		if i == v.sort {
			title += "*"
		}
		rows[0] = append(rows[0], title)
	}
	for _, e := range models {
		row := []string{e.model.Name}
		for _, c := range columns[1:] {
			row = append(row, fmt.Sprintf(c.format, c.value(e.model, &e.window)))
		}
		for i := range v.now.Weights {
			if w := &v.now.Weights[i]; w.Model == e.model.Name {
				row = append(row, w.String())
			}
		}
		switch s := e.model.Staffing; {
		case s.IsAsleep():
			row = append(row, s.State+": "+s.Why)
		case e.model.ReadyWorkers == 0:
			row = append(row, "not ready: "+e.model.NotReady)
		}
		rows = append(rows, row)
	}
	return table(rows)
}

func (v *view) workerTable() []string {
	rows := [][]string{{"worker", "pid", "gpu", "state", "batches", "restarts", "model"}}
	for _, m := range v.now.Models {
		if v.only != "" && m.Name != v.only {
			continue
		}
		for _, w := range m.Workers {
			rows = append(rows, []string{fmt.Sprintf("%s #%d", w.Name, w.ID), fmt.Sprint(w.Pid), w.GPU, w.State,
				fmt.Sprint(w.Batches), fmt.Sprint(w.Restarts), m.Name})
		}
	}
	if len(rows) == 1 {
		return nil
	}
	return table(rows)
}

// table aligns the first column left and the others right. The first row is the title; text beyond its columns follows.
func table(rows [][]string) []string {
	const longestName = 40
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		row[0] = cut(row[0], longestName)
		for i := range widths {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
	}
	var lines []string
	for _, row := range rows {
		line := fmt.Sprintf("%-*s", widths[0], row[0])
		for i, cell := range row[1:] {
			if i+1 < len(widths) {
				line += fmt.Sprintf("  %*s", widths[i+1], cell)
			} else {
				line += "  " + cell
			}
		}
		lines = append(lines, line)
	}
	return lines
}

// cut shortens a text to a number of characters.
func cut(s string, most int) string {
	if utf8.RuneCountInString(s) <= most {
		return s
	}
	return string([]rune(s)[:max(0, most-1)]) + "…"
}
