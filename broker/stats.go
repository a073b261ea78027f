// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"os"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/alias"
	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// stageStats is the running count. A copy of it is a count of its own, but for
// deaths and the seconds' lists.
type stageStats struct {
	requests, requeued, batches, rows uint64
	isolated, suspended               uint64
	attached, lost, hung, offenders   uint64
	byStatus                          [64]uint64
	sizes                             []uint64 // by rows
	reasons                           [8]uint64
	queue, dispatch, compute, total   histogram.Histogram
	deaths                            map[string]int // by worker name
	seconds                           seconds
}

func (s *stageStats) init(maxBatch int) {
	s.sizes = make([]uint64, maxBatch+1)
	s.deaths = map[string]int{}
}

// maxDeaths bounds how many worker names are remembered. Workers whose names
// never come again would fill it: then it starts anew.
const maxDeaths = 1024

// died counts a worker of that name.
func (s *stageStats) died(name string) {
	if _, known := s.deaths[name]; !known && len(s.deaths) >= maxDeaths {
		clear(s.deaths)
	}
	s.deaths[name]++
}

func (s *stageStats) ended(st status.Code) { s.byStatus[st%64]++ }

func (s *stageStats) dispatched(d *batcher.Dispatch) {
	s.batches++
	s.rows += uint64(d.Rows)
	s.sizes[min(d.Rows, len(s.sizes)-1)]++
	s.reasons[d.Why%8]++
}

func (s *stageStats) finished(info *slotInfo, st status.Code, started, finished int64) {
	s.ended(st)
	s.queue.Add(time.Duration(info.dispatched - info.arrived))
	s.dispatch.Add(time.Duration(started - info.dispatched))
	s.compute.Add(time.Duration(finished - started))
	s.total.Add(time.Duration(finished - info.arrived))
}

// answered counts a request whose worker has answered it but has not said when
// it ran: now is the latest that it can have ended.
func (s *stageStats) answered(info *slotInfo, st status.Code, now int64) {
	s.ended(st)
	s.queue.Add(time.Duration(info.dispatched - info.arrived))
	s.total.Add(time.Duration(now - info.arrived))
}

// Snapshot is the present state, as `ringbatch stats` shows it. It may be
// called from any goroutine while Serve runs; after that it has no models.
// Every model is asked for itself, so that no loop is held up by others', and
// a loop does no more than copy: the arithmetic is done here.
func (b *Broker) Snapshot() stats.Broker {
	s := b.snapshotSelf()
	for _, m := range b.models.list() {
		s.Models = append(s.Models, b.snapshotModel(m)...)
	}
	return s
}

// snapshotSelf is a Snapshot without the models.
func (b *Broker) snapshotSelf() stats.Broker {
	s := stats.Broker{
		Pid: os.Getpid(), Socket: b.cfg.Socket, Epoch: b.epoch, UptimeS: time.Since(b.started).Seconds(), Draining: b.models.drains(),
		Models: []stats.Model{}, Loops: []stats.Loop{},
	}
	for _, a := range b.models.listAliases() {
		line := stats.Alias{Name: a.Name}
		for _, t := range a.To {
			line.To = append(line.To, stats.AliasTarget{Model: t.Model, SharePercent: alias.Share(t.Share).Percent(), Clients: t.Clients})
		}
		s.Aliases = append(s.Aliases, line)
	}
	for _, l := range b.loops {
		l.do(func() { s.Loops = append(s.Loops, l.snapshot()) })
	}
	s.Processes, s.MPS = b.super.Snapshot()
	return s
}

// snapshotModel is a line for a model, or none if it is gone. A pipeline has one
// for the whole, as its clients see it, and then one for each stage.
func (b *Broker) snapshotModel(m *model) (lines []stats.Model) {
	var views []*view
	for _, s := range m.ring.stages {
		views = append(views, &view{stats: stageStats{sizes: make([]uint64, s.most+1)}})
	}
	var whole view
	if !m.do(func() {
		for i, s := range m.ring.stages {
			s.look(views[i])
		}
		if m.isPipeline() {
			m.ring.look(&whole)
		}
	}) {
		return nil
	}
	for _, v := range views {
		lines = append(lines, v.model())
		ms := &lines[len(lines)-1]
		for i := range ms.Workers {
			w := &ms.Workers[i]
			w.Restarts = max(w.Restarts, b.super.Restarts(w.Pid))
		}
	}
	if m.isPipeline() {
		whole.settings, whole.inputs = *m.inForce(), m.ring.layout.Signature.Inputs
		lines = append([]stats.Model{m.sum(whole.model(), lines)}, lines...)
	}
	return lines
}

// view is a stage as it was at one moment, copied on its loop.
type view struct {
	now       int64
	out       stats.Model // but for what model computes
	stats     stageStats
	latencies []histogram.Delta // of all of stats.seconds.cells
	settings  policy.Settings
	inputs    []tensor.Spec
	workers   []fitness
}

// learned takes over what the batcher has found out.
func (v *view) learned(l auto.Learned) {
	out := stats.Learned{Costs: []stats.LearnedCost{}, Slowdown: l.Slowdown, Tried: []stats.TriedWait{}, OneAtATime: l.OneAtATime}
	for _, c := range l.Costs {
		out.Costs = append(out.Costs, stats.LearnedCost{Rows: c.Rows, MS: ms(c.Time), Batches: c.Batches})
	}
	for _, t := range l.Tried {
		out.Tried = append(out.Tried, stats.TriedWait{WaitMS: ms(t.Wait), OneAtATime: t.OneAtATime, Latency: t.Latency})
	}
	v.out.WaitTimeMS, v.out.Learned = ms(l.Wait), out
}

// look copies what a snapshot needs, and changes nothing. What workers have
// finished and the books have not followed yet is counted in the copy.
func (s *stage) look(v *view) {
	r, sizes := s.ring, v.stats.sizes
	v.now = s.loop.now
	v.stats = s.stats
	v.stats.sizes, v.stats.deaths = sizes, nil
	copy(sizes, s.stats.sizes)
	v.copySeconds()
	v.settings, v.inputs, v.workers = s.settings, s.cfg.Signature.Inputs, s.fitWorkers()
	v.out = stats.Model{
		Name: s.cfg.Name, Signature: s.cfg.Signature.String(), Slots: r.layout.Slots, SlotsFree: r.windows.free,
		MaxBatchSize: s.settings.MaxBatchSize, WaitAuto: s.settings.WaitTime == policy.Auto, LatencyGoalMS: ms(s.settings.LatencyGoal), UptimeS: time.Since(s.since).Seconds(), Loop: s.loop.number,
		Clients: len(r.clients), QueueLength: s.batcher.Queued(), QueueRows: s.batcher.QueuedRows(),
		SlotsQueued: r.rows[queued], SlotsRunning: r.rows[running], SlotsHeld: r.rows[held],
		Workers: make([]stats.Worker, 0, s.present),
	}
	if r.isPipeline {
		v.out.SlotsQueued, v.out.SlotsRunning, v.out.SlotsHeld = s.batcher.QueuedRows(), 0, 0
		for _, w := range s.busy {
			for _, p := range w.mails {
				v.out.SlotsRunning += int(p.rows)
			}
		}
	}
	v.learned(s.batcher.Learned())
	v.stats.roll(v.now, s.present)
	for _, w := range s.workers {
		if w != nil {
			unread := s.lookDone(w, v)
			line := w.snapshot(len(w.mails) - unread)
			line.Batches += uint64(unread)
			if line.InFlight > 0 {
				v.stats.seconds.computed(min(w.mails[0].begun, v.now), v.now)
			}
			v.out.Workers = append(v.out.Workers, line)
		}
	}
}

// copySeconds gives the copy lists of latencies of its own.
func (v *view) copySeconds() {
	for i := range v.stats.seconds.cells {
		c := &v.stats.seconds.cells[i]
		from := len(v.latencies)
		v.latencies = append(v.latencies, c.total...)
		c.total = v.latencies[from:len(v.latencies):len(v.latencies)]
	}
}

// lookDone counts, in the copy, what a worker says it is done with and nobody
// has read. It returns how many batches that are.
func (s *stage) lookDone(w *workerSession, v *view) (batches int) {
	ahead := w.done // a copy: the ring is not taken from
	n, err := ahead.Pending()
	if w.broken || err != nil {
		return 0
	}
	for range min(n, len(w.mails)) {
		var d shm.Done
		ahead.Take(&d)
		i := slices.IndexFunc(w.mails, func(p *mail) bool { return p.batch == d.Batch })
		if i < 0 {
			return batches
		}
		p := w.mails[i]
		started := min(max(d.Started, p.posted), v.now)
		finished := min(max(d.Finished, started), v.now)
		v.stats.seconds.computed(started, finished)
		for _, q := range p.requests {
			if !s.ring.has(q, p.batch) {
				continue
			}
			info, word := s.ring.slot(q.head), s.ring.board.Word(q.head)
			switch {
			case info.state == running && word.Generation() == q.gen:
				v.stats.finished(info, word.Status(), started, finished)
				v.out.SlotsRunning -= int(info.commit.Rows)
			case info.state == held:
				v.out.SlotsHeld -= int(info.commit.Rows)
			}
		}
		batches++
	}
	return batches
}

// model computes what the loop only copied.
func (v *view) model() stats.Model {
	out, st := v.out, &v.stats
	out.Requests, out.Requeued, out.Batches, out.Rows = st.requests, st.requeued, st.batches, st.rows
	out.Isolated, out.WorkersSuspended = st.isolated, st.suspended
	out.WorkersAttached, out.WorkersLost, out.WorkersHung, out.Offenders = st.attached, st.lost, st.hung, st.offenders
	out.Policy = v.settings.Policy(v.inputs)
	out.ReadyWorkers, out.NotReady = judge(v.workers)
	out.Windows = st.seconds.windows(v.now, len(out.Workers))
	out.Latency = stats.Latency{Queue: percentiles(&st.queue), Dispatch: percentiles(&st.dispatch), Compute: percentiles(&st.compute), Total: percentiles(&st.total)}
	out.Histograms = stats.Histograms{Queue: bucketsOf(&st.queue), Dispatch: bucketsOf(&st.dispatch), Compute: bucketsOf(&st.compute), Total: bucketsOf(&st.total)}
	out.Ended, out.Reasons = map[string]uint64{}, map[string]uint64{}
	for i, n := range st.byStatus {
		if n > 0 {
			out.Ended[status.Code(i).Name()] = n
		}
	}
	out.BatchSize.Histogram = map[int]uint64{}
	for rows, n := range st.sizes {
		if n > 0 {
			out.BatchSize.Histogram[rows] = n
		}
	}
	if st.batches > 0 {
		out.BatchSize.Avg = float64(st.rows) / float64(st.batches)
	}
	for i, n := range st.reasons {
		if n > 0 {
			out.Reasons[batcher.Reason(i).String()] = n
		}
	}
	return out
}

func (w *workerSession) snapshot(inFlight int) stats.Worker {
	state := "idle"
	switch {
	case w.quarantined:
		state = "quarantined"
	case w.dying || w.verdict > 0:
		state = "dying"
	case w.suspended:
		state = "suspended"
	case inFlight > 0:
		state = "busy"
	case w.reserve:
		state = "spare"
	}
	return stats.Worker{
		ID: int(w.id), Name: w.label(), Pid: w.pid, GPU: w.info.GPU, State: state, SinceS: time.Since(w.since).Seconds(),
		InFlight: inFlight, Batches: w.batches, BusyS: w.computed.Seconds(), Restarts: w.restarts,
	}
}

func percentiles(h *histogram.Histogram) stats.Percentiles {
	return stats.Percentiles{Avg: ms(h.Mean()), P50: ms(h.Quantile(0.5)), P90: ms(h.Quantile(0.9)), P99: ms(h.Quantile(0.99)), Max: ms(h.Max())}
}

func bucketsOf(h *histogram.Histogram) stats.Histogram {
	out := stats.Histogram{Count: h.Count(), SumS: h.Sum().Seconds(), Buckets: []stats.Bucket{}}
	for _, b := range h.Buckets() {
		out.Buckets = append(out.Buckets, stats.Bucket{UpperS: b.Upper.Seconds(), Count: b.Count})
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
