// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/stats"
)

// view is what is shown and how.
type view struct {
	socket string
	now    *stats.Broker // nil until the first answer
	at     time.Time     // of that answer
	err    error         // why there is none now
	before map[workerKey]workerCount
	rates  map[workerKey]workerRate

	batches []stats.Batch // of the chosen model, the last laneSeconds
	from    int64         // what happened before is not known, in Unix µs
	until   int64

	chosen   string // a model
	sort     int    // one of sorts
	reversed bool
	window   int // one of windows
	paused   bool
	help     bool
	down     int // lines by which the details are scrolled
}

const laneSeconds = 2

var windows = []int{1, 10, 60} // seconds

// sorts are what the models can be sorted by. All but the name have the largest
// first.
var sorts = []struct {
	name string // as the column is titled
	by   func(m *stats.Model, w *stats.Window) float64
}{
	{"model", nil},
	{"req/s", func(_ *stats.Model, w *stats.Window) float64 { return w.RequestsPerS }},
	{"p50 ms", func(_ *stats.Model, w *stats.Window) float64 { return w.Latency.P50 }},
	{"p99 ms", func(_ *stats.Model, w *stats.Window) float64 { return w.Latency.P99 }},
	{"rows/batch", func(_ *stats.Model, w *stats.Window) float64 { return w.RowsPerBatch }},
	{"busy", func(_ *stats.Model, w *stats.Window) float64 { return w.Busy }},
	{"queue", func(m *stats.Model, _ *stats.Window) float64 { return float64(m.QueueLength) }},
	{"ring", func(m *stats.Model, _ *stats.Window) float64 { return ringShare(m) }},
	{"failed/s", func(_ *stats.Model, w *stats.Window) float64 { return w.FailedPerS }},
}

type workerKey struct {
	model string
	id    int
}

type workerCount struct {
	at      time.Time
	busyS   float64
	batches uint64
}

// workerRate is what a worker did between two snapshots.
type workerRate struct {
	busy    float64 // share
	batchMS float64
	batches uint64
}

func newView(socket, model string) *view {
	return &view{socket: socket, chosen: model, window: 1, before: map[workerKey]workerCount{}}
}

// take makes a snapshot the shown one.
func (v *view) take(s snapshot) {
	if v.err = s.err; s.err != nil {
		return // what is known stays on the screen
	}
	if v.now != nil && v.now.Epoch != s.stats.Epoch {
		clear(v.before) // another broker
		v.batches = nil
	}
	place := v.place()
	v.now, v.at = s.stats, s.at
	v.countWorkers()
	if models := v.models(); len(models) == 0 {
		v.batches = nil
	} else if v.now.Model(v.chosen) == nil { // the first one, or the one that took its place
		v.choose(models[min(max(0, place), len(models)-1)].Name)
	}
	if s.batches != nil && s.model == v.chosen {
		v.addBatches(s)
	}
}

// countWorkers compares with the snapshot before.
func (v *view) countWorkers() {
	count := map[workerKey]workerCount{}
	v.rates = map[workerKey]workerRate{}
	for i := range v.now.Models {
		m := &v.now.Models[i]
		for _, w := range m.Workers {
			k := workerKey{m.Name, w.ID}
			c := workerCount{v.at, w.BusyS, w.Batches}
			count[k] = c
			b, ok := v.before[k]
			if !ok { // since it attached
				b = workerCount{at: v.at.Add(-time.Duration(w.SinceS * float64(time.Second)))}
			}
			r := workerRate{batches: c.batches - min(b.batches, c.batches)}
			busy := max(0, c.busyS-b.busyS)
			if passed := v.at.Sub(b.at).Seconds(); passed > 0 {
				r.busy = min(1, busy/passed)
			}
			if r.batches > 0 {
				r.batchMS = 1e3 * busy / float64(r.batches)
			}
			v.rates[k] = r
		}
	}
	v.before = count
}

func (v *view) addBatches(s snapshot) {
	list := s.batches.Batches
	v.until = s.batches.NowUS
	if s.missed || v.batches == nil {
		v.batches, v.from = []stats.Batch{}, 0
		if s.missed && len(list) > 0 {
			v.from = list[0].StartedUS
		}
	}
	v.from = max(v.from, v.until-laneSeconds*1e6)
	v.batches = append(v.batches, list...)
	v.batches = slices.DeleteFunc(v.batches, func(b stats.Batch) bool { return b.FinishedUS < v.from })
}

// models are those of the broker, as they are sorted.
func (v *view) models() []*stats.Model {
	if v.now == nil {
		return nil
	}
	list := make([]*stats.Model, len(v.now.Models))
	for i := range list {
		list[i] = &v.now.Models[i]
	}
	by := sorts[v.sort].by
	slices.SortStableFunc(list, func(x, y *stats.Model) int {
		c := strings.Compare(x.Name, y.Name)
		if by != nil {
			wx, wy := x.Window(windows[v.window]), y.Window(windows[v.window])
			c = cmp.Or(cmp.Compare(by(y, &wy), by(x, &wx)), c)
		}
		if v.reversed {
			c = -c
		}
		return c
	})
	return list
}

// place is where the chosen model stands, or -1.
func (v *view) place() int {
	return slices.IndexFunc(v.models(), func(m *stats.Model) bool { return m.Name == v.chosen })
}

func (v *view) choose(name string) {
	if name != v.chosen {
		v.chosen, v.batches, v.down = name, nil, 0
	}
}

// move chooses another model, by its distance in the list.
func (v *view) move(by int) {
	if models := v.models(); len(models) > 0 {
		v.choose(models[min(max(0, v.place()+by), len(models)-1)].Name)
	}
}

// press is what a key does.
func (v *view) press(k key) {
	const end = 1 << 20
	if v.help {
		v.help = false // any key
		return
	}
	switch k {
	case keyUp, 'k':
		v.move(-1)
	case keyDown, 'j':
		v.move(1)
	case keyHome, 'g':
		v.move(-end)
	case keyEnd, 'G':
		v.move(end)
	case keyPageDown, 'J':
		v.down += detailPage
	case keyPageUp, 'K':
		v.down = max(0, v.down-detailPage)
	case 's', keyRight:
		v.sort, v.reversed = (v.sort+1)%len(sorts), false
	case 'S', keyLeft:
		v.sort, v.reversed = (v.sort+len(sorts)-1)%len(sorts), false
	case 'r':
		v.reversed = !v.reversed
	case 'w':
		v.window = (v.window + 1) % len(windows)
	case 'p', ' ':
		v.paused = !v.paused
	case '?', 'h':
		v.help = true
	}
}

const detailPage = 5 // lines

// ringShare is how much of a model's ring is in use, 0..1.
func ringShare(m *stats.Model) float64 {
	return float64(m.SlotsQueued+m.SlotsRunning+m.SlotsHeld) / float64(max(1, m.Slots))
}
