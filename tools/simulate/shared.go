// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/broker/staffing"
)

// Models that share the memory of a GPU, sleep, and follow their loads: the rules of package
// staffing with a virtual clock. Starts take their time, and a batch is one request.

// sharedModel is written as NAME,memory=6,start=4s,takes=20ms,rate=5, with on=, off=, idle=,
// goal= and instances=0-4.
type sharedModel struct {
	name               string
	gib, rate          float64 // memory of a worker; requests a second while the load is on
	start, takes       time.Duration
	on, off, idle      time.Duration // off 0: the load is always on
	goal               time.Duration
	least, most        int
	loaded             bool
	switches           staffing.Time // when the load goes on or off
	state              staffing.State
	waits              bool
	since, began, used staffing.Time
	workers            []staffing.Time // when each has attached, or has ended its batch
	queue              []staffing.Time
	arrived, answered  []staffing.Time // of the last sharedSpan
	follow             staffing.Follower

	latencies             []int64
	wakes, up, down, peak int
	awake                 time.Duration
}

const (
	sharedTick = 5 * time.Millisecond
	sharedLook = 500 * time.Millisecond // as package broker
	sharedEnd  = 200 * time.Millisecond // from the last batch until the memory is free
	sharedSpan = time.Second            // of the rates that the follower sees
	maxShared  = 10_000_000             // requests of a model: 16 bytes each
	maxGPU     = 1 << 20                // GiB
)

// sharedGPU is the world.
type sharedGPU struct {
	budget, peak float64 // GiB
	models       []*sharedModel
	rng          *rand.Rand
}

func bytesOf(gib float64, workers int) staffing.Bytes {
	return staffing.Bytes{0: int64(gib*float64(workers)*(1<<20)) << 10}
}

func parseShared(text string) (m *sharedModel, err error) {
	name, rest, _ := strings.Cut(text, ",")
	m = &sharedModel{name: name, gib: 1, rate: 1, start: 5 * time.Second, takes: 20 * time.Millisecond, on: time.Minute, least: 1, most: 1}
	if name == "" || strings.Contains(name, "=") {
		return nil, bad("--share %q: begin with a name, as in a,memory=6,start=4s", text)
	}
	for option := range strings.SplitSeq(rest, ",") {
		if option == "" {
			continue
		}
		key, value, _ := strings.Cut(option, "=")
		switch key {
		case "memory":
			m.gib, err = strconv.ParseFloat(value, 64)
		case "rate":
			m.rate, err = strconv.ParseFloat(value, 64)
		case "instances":
			least, most, ranged := strings.Cut(value, "-")
			if m.least, err = strconv.Atoi(least); err == nil && ranged {
				m.most, err = strconv.Atoi(most)
			} else {
				m.most = m.least
			}
		default:
			d := map[string]*time.Duration{"start": &m.start, "takes": &m.takes, "on": &m.on, "off": &m.off, "idle": &m.idle, "goal": &m.goal}[key]
			if d == nil {
				return nil, bad("--share %q: no %q; there are memory, rate, start, takes, on, off, idle, goal and instances", text, key)
			}
			*d, err = time.ParseDuration(value)
		}
		if err != nil {
			return nil, bad("--share %q: %s: %v", text, key, err)
		}
	}
	if m.start >= staffing.HangTime {
		return nil, bad("--share %q: start must be less than %v: a longer one fails while others wait for the room", text, staffing.HangTime)
	}
	least := min(m.on, m.start, m.takes)
	return m, need(m.gib > 0 && m.rate >= 0 && least > 0 && min(m.off, m.idle, m.goal) >= 0 &&
		m.least >= 0 && m.most >= max(1, m.least) && m.most <= maxWorkers && m.rate <= 1000,
		"--share %q: want positive numbers, a rate of at most 1000, and instances like 2 or 0-4", text)
}

// run simulates so long a time.
func (g *sharedGPU) run(ctx context.Context, length time.Duration) error {
	for now, look := staffing.Time(1), staffing.Time(0); now < length; now += sharedTick {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		changed := false
		held := 0.0
		for _, m := range g.models {
			m.arrive(now, g.rng)
			changed = m.serve(now) || changed
			if m.state != staffing.Asleep {
				held += m.gib * float64(len(m.workers))
				m.awake += sharedTick
			}
		}
		g.peak = max(g.peak, held)
		if changed || now >= look {
			g.look(now)
			look = now + sharedLook
		}
	}
	return nil
}

// arrive adds the requests of a tick, and begins or ends the load.
func (m *sharedModel) arrive(now staffing.Time, rng *rand.Rand) {
	if now >= m.switches {
		mean := m.on
		if m.loaded = !m.loaded || m.off == 0; !m.loaded {
			mean = m.off
		}
		m.switches = now + time.Duration(rng.ExpFloat64()*float64(mean))
	}
	if !m.loaded {
		return
	}
	for sum := rng.ExpFloat64(); sum < m.rate*sharedTick.Seconds(); sum += rng.ExpFloat64() {
		m.queue, m.arrived, m.used = append(m.queue, now), append(m.arrived, now), now
	}
}

// serve runs requests, and brings the state on. It returns true if the staff looks at once.
func (m *sharedModel) serve(now staffing.Time) (changed bool) {
	switch {
	case m.state == staffing.Asleep:
		return len(m.queue) > 0 && !m.waits
	case m.state == staffing.Waking && now >= m.began+m.start:
		m.state, m.since, m.used = staffing.Awake, now, now
		m.wakes++
		changed = true
	case m.state == staffing.Ending:
		if now >= m.since+m.takes+sharedEnd {
			m.state, m.since, m.workers = staffing.Asleep, now, nil
			changed = true
		}
		return changed
	}
	for i := range m.workers {
		for m.workers[i] < now && len(m.queue) > 0 {
			m.workers[i] = max(m.workers[i], now-sharedTick, m.queue[0]) + m.takes
			m.latencies = append(m.latencies, int64(m.workers[i]-m.queue[0]))
			m.answered, m.queue = append(m.answered, m.workers[i]), m.queue[1:]
		}
	}
	return changed
}

func (m *sharedModel) busy(now staffing.Time) (n int) {
	for _, free := range m.workers {
		if free > now && m.state == staffing.Awake && free <= now+m.takes {
			n++
		}
	}
	return n
}

// look is what package broker's staff does.
func (g *sharedGPU) look(now staffing.Time) {
	budgets := bytesOf(g.budget, 1)
	old := func(at staffing.Time) bool { return at < now-sharedSpan }
	for _, m := range g.models {
		m.arrived, m.answered = slices.DeleteFunc(m.arrived, old), slices.DeleteFunc(m.answered, old)
		switch {
		case m.state == staffing.Asleep && len(m.queue) > 0 && !m.waits:
			m.waits, m.since = true, now
		case m.state == staffing.Awake && m.idle > 0 && now-m.used >= m.idle && len(m.queue)+m.busy(now) == 0:
			m.state, m.since = staffing.Ending, now
		case m.state == staffing.Awake && m.most > max(1, m.least):
			m.followLoad(now, func(more int) bool { return staffing.Fits(budgets, bytesOf(m.gib, more), g.tenants(now)) })
		}
	}
	plan := staffing.Room(now, budgets, g.tenants(now))
	for _, m := range g.models {
		switch {
		case slices.Contains(plan.Wake, m.name):
			m.waits, m.state, m.since, m.began = false, staffing.Waking, now, now
			m.setWorkers(max(1, m.least), now)
		case slices.Contains(plan.Sleep, m.name) && m.state == staffing.Awake:
			m.state, m.since = staffing.Ending, now
		}
		if m.state == staffing.Awake && len(plan.Holders) > 0 && len(m.workers) > max(1, m.least) {
			m.setWorkers(max(1, m.least), now)
			m.down++
		}
	}
}

func (m *sharedModel) setWorkers(n int, now staffing.Time) {
	for len(m.workers) < n {
		m.workers = append(m.workers, now+m.start)
	}
	m.workers = m.workers[:n]
	m.peak = max(m.peak, n)
}

func (m *sharedModel) followLoad(now staffing.Time, fits func(more int) bool) {
	w := staffing.Work{Queued: len(m.queue), Busy: m.busy(now), Goal: m.goal, Span: sharedSpan,
		Requests: uint64(len(m.arrived)), Answered: uint64(len(m.answered)), Computed: time.Duration(len(m.answered)) * m.takes}
	for _, free := range m.workers {
		if free <= now+m.takes {
			w.Workers++
		}
	}
	w.Lanes = w.Workers
	have := len(m.workers)
	want := m.follow.Decide(now, &w, have, m.least, m.most)
	for want > have && !fits(want-have) {
		want--
	}
	if want > have {
		m.up++
	} else if want < have {
		m.down++
	}
	m.setWorkers(want, now)
}

func (g *sharedGPU) tenants(now staffing.Time) (list []staffing.Tenant) {
	for _, m := range g.models {
		t := staffing.Tenant{Name: m.name, State: m.state, Waits: m.waits, Since: m.since, Used: m.used, Took: m.start,
			Busy: len(m.queue)+m.busy(now) > 0, Needs: bytesOf(m.gib, max(1, m.least, len(m.workers)))}
		if m.state == staffing.Awake {
			t.Since = m.began
		}
		list = append(list, t)
	}
	return list
}

// SharedResult is what happened to models that share a GPU.
type SharedResult struct {
	Models []SharedModelResult `json:"models"`
	Held   float64             `json:"held_gib"` // at most
	Budget float64             `json:"budget_gib"`
}

// SharedModelResult is what happened to one of them.
type SharedModelResult struct {
	Name       string  `json:"name"`
	Requests   int     `json:"requests"`
	Unanswered int     `json:"unanswered"`
	Latency    Latency `json:"latency_ms"`
	Wakes      int     `json:"wakes"`
	Awake      float64 `json:"awake"`   // share of the time
	Workers    int     `json:"workers"` // at most
	Up         int     `json:"up"`      // changes with the load
	Down       int     `json:"down"`
}

func (g *sharedGPU) result(length time.Duration) *SharedResult {
	r := &SharedResult{Held: g.peak, Budget: g.budget}
	for _, m := range g.models {
		slices.Sort(m.latencies)
		r.Models = append(r.Models, SharedModelResult{m.name, len(m.latencies) + len(m.queue), len(m.queue), summarise(m.latencies), m.wakes,
			float64(m.awake) / float64(length), m.peak, m.up, m.down})
	}
	return r
}

// WriteText writes a table.
func (r *SharedResult) WriteText(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "model\trequests\tunanswered\tp50\tp99\tmax\twakes\tawake\tworkers\tups\tdowns\t")
	for _, m := range r.Models {
		fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\t%s\t%d\t%.0f %%\t%d\t%d\t%d\t\n", m.Name, m.Requests, m.Unanswered, short(m.Latency.P50),
			short(m.Latency.P99), short(m.Latency.Max), m.Wakes, 100*m.Awake, m.Workers, m.Up, m.Down)
	}
	_ = t.Flush()
	_, err := fmt.Fprintf(w, "\nGPU memory held: %.3g GiB at most, of %.3g\n", r.Held, r.Budget)
	return err
}

// runShared simulates the models of --share.
func (c *Command) runShared(ctx context.Context) (*SharedResult, error) {
	g := &sharedGPU{budget: c.gpuMemory, rng: rand.New(rand.NewPCG(c.seed, 0x73686172))}
	if c.length <= 0 || c.length > 7*24*time.Hour {
		return nil, bad("--length is %v, must be more than 0 and at most a week", c.length)
	}
	if !(c.gpuMemory <= maxGPU) {
		return nil, bad("--share: --gpu-memory is %v, must be at most %d", c.gpuMemory, maxGPU)
	}
	for _, text := range c.shares {
		m, err := parseShared(text)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(g.models, func(x *sharedModel) bool { return x.name == m.name }) {
			return nil, bad("--share: two models are called %q", m.name)
		}
		if needs := m.gib * float64(max(1, m.least)); !(needs <= g.budget) {
			return nil, bad("--share %q: its workers take %.3g GiB, --gpu-memory is %.3g", text, needs, g.budget)
		}
		if n := m.rate * c.length.Seconds(); n > maxShared {
			return nil, bad("--share %q: %.0f requests in %v, must be at most %d", text, n, c.length, maxShared)
		}
		g.models = append(g.models, m)
	}
	err := g.run(ctx, c.length)
	return g.result(c.length), err
}
