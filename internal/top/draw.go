// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/stats"
)

// draw is the screen: a head, the models, the details of the chosen one, and a
// foot. What has no room is left out, details first.
func (v *view) draw(width, height int) []string {
	lines := v.head(width)
	foot := v.foot(width)
	if v.help {
		lines = append(lines, v.helpLines(width)...)
	} else {
		lines = append(lines, v.body(width, height-len(lines)-1)...)
	}
	if len(lines) > height-1 {
		lines = lines[:max(1, height-1)]
	}
	for len(lines) < height-1 {
		lines = append(lines, newLine(width))
	}
	if height > 1 {
		lines = append(lines, foot)
	}
	texts := make([]string, len(lines))
	for i, l := range lines {
		texts[i] = l.String()
	}
	return texts
}

func (v *view) head(width int) []*line {
	l := newLine(width).add(bold, "ringbatch").add(plain, "  ")
	if v.now != nil {
		l.add(plain, fmt.Sprintf("broker pid %d, up %s", v.now.Pid, since(v.now.UptimeS)))
		if v.now.Draining {
			l.add(plain, ", ").add(bad, "draining")
		}
	}
	l.add(dim, "  "+v.socket)
	state := fmt.Sprintf("last %d s", windows[v.window])
	if v.paused {
		state = "PAUSED at " + v.at.Format(time.TimeOnly)
	}
	if l.wide+2+len(state) <= width {
		l.fill(plain, width-len(state)).add(bold, state)
	}
	lines := []*line{l}
	if v.err != nil {
		text := "no answer from the broker; trying again: " + v.err.Error()
		if v.now != nil {
			text = "no answer since " + v.at.Format(time.TimeOnly) + ", trying again: " + v.err.Error()
		}
		lines = append(lines, newLine(width).add(badBold, text))
	}
	return lines
}

func (v *view) foot(width int) *line {
	l := newLine(width)
	for _, k := range [][2]string{{"q", "quit"}, {"j k", "model"}, {"s", "sort: " + sorts[v.sort].name}, {"w", "window"}, {"p", "pause"}, {"?", "help"}} {
		l.add(bold, k[0]).add(dim, " "+k[1]+"   ")
	}
	return l
}

func (v *view) helpLines(width int) []*line {
	var lines []*line
	for _, k := range [][2]string{
		{"j k ↓ ↑", "choose a model"},
		{"g G", "the first, the last model"},
		{"s S → ←", "sort by the next, the previous column"},
		{"r", "turn the order around"},
		{"w", "figures of the last 1, 10 or 60 seconds"},
		{"J K PgDn PgUp", "scroll what is shown of the model"},
		{"p space", "pause"},
		{"Ctrl-L", "draw again"},
		{"q Ctrl-C", "quit"},
		{"", ""},
		{"lanes", fmt.Sprintf("the last %d s of a worker: · idle most of the time, ░▒▓█ busy, darker with more rows a batch", laneSeconds)},
		{"", ""},
		{"", "any key goes back"},
	} {
		lines = append(lines, newLine(width).add(bold, pad(k[0], 15, true)).add(plain, k[1]))
	}
	return lines
}

// body is the models and the details, in so many lines.
func (v *view) body(width, height int) []*line {
	models := v.models()
	if len(models) == 0 {
		if v.now == nil {
			return nil
		}
		return []*line{newLine(width).add(plain, "no models yet: start a worker, or declare one with --config or --model")}
	}
	details := v.details(width)
	const titleAndBlank = 2
	room := min(len(models), max(1, height/3, height-titleAndBlank-len(details)))
	title, rows := v.modelTable(width, models)
	first := min(max(0, v.place()-room/2), len(rows)-room)
	lines := append([]*line{title}, rows[first:first+room]...)
	if height < len(lines) {
		return lines[1:]
	}
	lines = append(lines, newLine(width))
	return append(lines, v.scrolled(width, details, height-len(lines))...)
}

// scrolled is the part of the details that has room.
func (v *view) scrolled(width int, details []*line, room int) []*line {
	if room <= 0 {
		return nil
	}
	v.down = min(v.down, max(0, len(details)-room))
	details = details[v.down:]
	if len(details) > room {
		more := len(details) - room + 1
		details = append(details[:room-1:room-1], newLine(width).add(dim, fmt.Sprintf("… %d more lines: J K", more)))
	}
	return details
}

func (v *view) modelTable(width int, models []*stats.Model) (*line, []*line) {
	cols := []column{{"model", true, 12, 0}, {"req/s", false, 7, 1}, {"rows/s", false, 7, 8}, {"p50 ms", false, 7, 4}, {"p99 ms", false, 7, 2}, {"rows/batch", false, 6, 5}, {"busy", false, 5, 6}, {"queue", false, 5, 3}, {"ring", false, 5, 7}, {"failed/s", false, 5, 9}, {"workers", false, 3, 10}, {"clients", false, 3, 11}}
	for i := range cols {
		if cols[i].title == sorts[v.sort].name {
			cols[i].title += map[bool]string{false: "↓", true: "↑"}[v.reversed != (v.sort == 0)]
		}
	}
	if len(models) > 1 {
		cols[0].title += fmt.Sprintf(" %d of %d", v.place()+1, len(models))
	}
	var rows []row
	for _, m := range models {
		w := m.Window(windows[v.window])
		r := row{cells: []string{m.Name, number(w.RequestsPerS), number(w.RowsPerS), millis(w.Latency.P50), millis(w.Latency.P99), number(w.RowsPerBatch), percent(w.Busy), fmt.Sprint(m.QueueLength), percent(ringShare(m)), number(w.FailedPerS), fmt.Sprintf("%d/%d", m.ReadyWorkers, len(m.Workers)), fmt.Sprint(m.Clients)}}
		if len(m.Stages) > 0 { // whose batches and workers are of its stages
			r.cells[5], r.cells[6], r.cells[10] = "-", "-", fmt.Sprint(m.ReadyWorkers)
		}
		switch {
		case m.Name == v.chosen:
			r.style = chosen
		case v.err != nil:
			r.style = dim
		case m.ReadyWorkers == 0:
			r.style = bad
		}
		rows = append(rows, r)
	}
	title, lines, _ := table(width, cols, rows)
	return title, lines
}

// details is everything about the chosen model.
func (v *view) details(width int) []*line {
	m := v.now.Model(v.chosen)
	if m == nil {
		return nil
	}
	state := newLine(width).add(bold, m.Name).add(plain, "  ")
	if m.ReadyWorkers > 0 {
		state.add(good, "ready")
	} else {
		state.add(bad, "not ready: "+m.NotReady)
	}
	wait := millis(m.WaitTimeMS) + " ms"
	switch {
	case m.Learned.OneAtATime:
		wait = "auto, now one batch at a time"
	case m.WaitAuto:
		wait = "auto, now " + wait
	}
	state.add(plain, fmt.Sprintf("  wait %s  up to %s  ring of %s", wait, plural(m.MaxBatchSize, "row"), plural(m.Slots, "slot")))
	lines := []*line{state, newLine(width).add(dim, m.Signature)}
	if names := v.aliases(m.Name); names != "" {
		lines = append(lines, newLine(width).add(dim, "also called ").add(plain, names))
	}
	lines = append(lines, v.workers(width, m)...)
	lines = append(lines, ends(width, m))
	if l := learned(width, m); l != nil {
		lines = append(lines, l)
	}
	return append(lines, v.processes(width, m.Name)...)
}

// aliases are the names that stand for the model, and the share that it has of
// each.
func (v *view) aliases(model string) string {
	var names []string
	for _, a := range v.now.Aliases {
		for _, t := range a.To {
			if t.Model == model {
				names = append(names, fmt.Sprintf("%s (%.3g %%, %s)", a.Name, t.SharePercent, plural(t.Clients, "client")))
			}
		}
	}
	return strings.Join(names, ", ")
}

func (v *view) workers(width int, m *stats.Model) []*line {
	if len(m.Workers) == 0 {
		return nil
	}
	const leastLane, gap = 16, 2
	var rows []row
	lanes := make([]func(n int) string, len(m.Workers))
	for i, w := range m.Workers {
		r := v.rates[workerKey{m.Name, w.ID}]
		batch := "-"
		if r.batches > 0 {
			batch = millis(r.batchMS)
		}
		lanes[i] = func(n int) string { return v.lane(w.ID, m.MaxBatchSize, n) }
		rows = append(rows, row{cells: []string{fmt.Sprintf("%s #%d", w.Name, w.ID), fmt.Sprint(w.Pid), orDash(w.GPU), w.State, percent(r.busy), batch, fmt.Sprint(w.Batches), fmt.Sprint(w.Restarts)}})
	}
	cols := []column{{"worker", true, 10, 0}, {"pid", false, 0, 5}, {"gpu", true, 0, 4}, {"state", true, 5, 1}, {"busy", false, 5, 2}, {"batch ms", false, 7, 3}, {"batches", false, 7, 6}, {"restarts", false, 0, 7}}
	title, lines, spare := table(width, cols, rows)
	legend := fmt.Sprintf("batches of the last %.2g s, darker with more rows", float64(v.until-v.from)/1e6)
	if beside := spare - gap; beside >= leastLane { // a lane has room at the right of its worker
		at := width - beside
		title.fill(plain, at).add(dim, legend)
		for i, l := range lines {
			l.fill(plain, at).add(plain, lanes[i](beside))
		}
		return append([]*line{newLine(width), title}, lines...)
	}
	all := []*line{newLine(width), title}
	for i, l := range lines {
		all = append(all, l, newLine(width).add(plain, "  "+lanes[i](width-4)))
	}
	return all
}

// lane is what a worker did lately, oldest first, in n columns.
func (v *view) lane(worker, mostRows, n int) string {
	if v.until <= v.from || n <= 0 {
		return ""
	}
	step := float64(v.until-v.from) / float64(n)
	busy, rows := make([]float64, n), make([]float64, n) // µs in each column; the same times rows
	for _, b := range v.batches {
		if b.Worker != worker {
			continue
		}
		from, to := float64(b.StartedUS-v.from)/step, float64(b.FinishedUS-v.from)/step
		for i := max(0, int(from)); i < min(n, int(to)+1); i++ {
			part := max(0, min(to, float64(i+1))-max(from, float64(i)))
			busy[i] += part
			rows[i] += part * float64(b.Rows)
		}
	}
	shades := []rune("░▒▓█")
	out := make([]rune, n)
	for i := range out {
		switch {
		case busy[i] == 0:
			out[i] = ' '
		case busy[i] < 0.5:
			out[i] = '·'
		default:
			share := rows[i] / busy[i] / float64(max(1, mostRows))
			out[i] = shades[min(len(shades)-1, max(0, int(math.Ceil(share*float64(len(shades))))-1))]
		}
	}
	return string(out)
}

func ends(width int, m *stats.Model) *line {
	l := newLine(width).add(dim, "ended      ")
	if len(m.Ended) == 0 {
		return l.add(plain, "none")
	}
	for _, name := range sortedKeys(m.Ended) {
		s := bad
		if name == "OK" {
			s = good
		}
		l.add(s, fmt.Sprintf("%s %d", name, m.Ended[name])).add(plain, "  ")
	}
	return l
}

func learned(width int, m *stats.Model) *line {
	if len(m.Learned.Costs) == 0 {
		return nil
	}
	const most = 6
	l := newLine(width).add(dim, "a batch of ")
	step := max(1, (len(m.Learned.Costs)+most-1)/most)
	for i := 0; i < len(m.Learned.Costs); i += step {
		c := m.Learned.Costs[i]
		l.add(plain, fmt.Sprintf("%s %s ms  ", plural(c.Rows, "row"), millis(c.MS)))
	}
	return l
}

func (v *view) processes(width int, model string) []*line {
	var rows []row
	for _, p := range v.now.Processes {
		if p.Model != model {
			continue
		}
		name, gpu := p.Name, "-"
		if p.Spare {
			name += " (spare)"
		}
		if p.GPU != nil {
			gpu = fmt.Sprint(*p.GPU)
		}
		r := row{cells: []string{name, fmt.Sprint(p.Pid), gpu, p.State, since(p.SinceS), fmt.Sprint(p.Restarts), p.LastEnd}}
		if p.State != "running" {
			r.style = bad
		}
		rows = append(rows, r)
	}
	if len(rows) == 0 {
		return nil
	}
	cols := []column{{"process", true, 10, 0}, {"pid", false, 0, 4}, {"gpu", false, 0, 3}, {"state", true, 7, 1}, {"since", false, 6, 5}, {"restarts", false, 0, 2}, {"last end", true, 0, 6}}
	title, lines, _ := table(width, cols, rows)
	if v.now.MPS != "" {
		title.add(dim, "  MPS: "+v.now.MPS)
	}
	return append([]*line{newLine(width), title}, lines...)
}

func sortedKeys(m map[string]uint64) []string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// number is short, as on the page.
func number(x float64) string {
	switch {
	case x >= 1e6:
		return fmt.Sprintf("%.2f M", x/1e6)
	case x >= 1e4:
		return fmt.Sprintf("%.1f k", x/1e3)
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}

func millis(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 1:
		return fmt.Sprintf("%.2f", x)
	}
	return fmt.Sprintf("%.3f", x)
}

func percent(x float64) string { return fmt.Sprintf("%.0f %%", 100*x) }

func plural(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// since has two units, the largest ones.
func since(s float64) string {
	d := int(s)
	switch {
	case d >= 86400:
		return fmt.Sprintf("%d d %d h", d/86400, d%86400/3600)
	case d >= 3600:
		return fmt.Sprintf("%d h %d min", d/3600, d%3600/60)
	case d >= 60:
		return fmt.Sprintf("%d min %d s", d/60, d%60)
	}
	return fmt.Sprintf("%d s", d)
}
