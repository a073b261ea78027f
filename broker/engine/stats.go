// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// stageStats are the running counts. A copy shares deaths and the seconds' lists.
type stageStats struct {
	requests, requeued, batches, rows uint64
	isolated, suspended, cost, begun  uint64
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

// maxDeaths bounds the remembered worker names, which may never come again.
const maxDeaths = 1024

func (s *stageStats) countDeath(name string) {
	if _, known := s.deaths[name]; !known && len(s.deaths) >= maxDeaths {
		clear(s.deaths)
	}
	s.deaths[name]++
}

func (s *stageStats) countEnd(st status.Code) { s.byStatus[st%64]++ }

func (s *stageStats) countBatch(d *batcher.Dispatch) {
	s.batches++
	s.rows += uint64(d.Rows)
	s.cost += uint64(d.Cost)
	s.sizes[min(d.Rows, len(s.sizes)-1)]++
	s.reasons[d.Why%8]++
}

func (s *stageStats) countFinished(info *slotInfo, st status.Code, started, finished int64) {
	s.countEnd(st)
	s.queue.Add(time.Duration(info.dispatched - info.arrived))
	s.dispatch.Add(time.Duration(started - info.dispatched))
	s.compute.Add(time.Duration(finished - started))
	s.total.Add(time.Duration(finished - info.arrived))
}

// countAnswered counts an answered request whose times are not known yet.
func (s *stageStats) countAnswered(info *slotInfo, st status.Code, now int64) {
	s.countEnd(st)
	s.queue.Add(time.Duration(info.dispatched - info.arrived))
	s.total.Add(time.Duration(now - info.arrived))
}

// Snapshot is a line for each stage and, of a pipeline, one for the whole, without names
// and policy; false if the ring is gone. The loop only copies.
func (r *Ring) Snapshot() (stages []stats.Model, whole stats.Model, ok bool) {
	var views []*view
	for _, s := range r.stages {
		views = append(views, &view{stats: stageStats{sizes: make([]uint64, s.most+1)}})
	}
	var all view
	if !r.Do(func() {
		for i, s := range r.stages {
			s.lookAtStage(views[i])
		}
		if r.isPipeline {
			r.lookAtWhole(&all)
		}
	}) {
		return nil, whole, false
	}
	for _, v := range views {
		stages = append(stages, v.model())
	}
	if r.isPipeline {
		whole = all.model()
	}
	return stages, whole, true
}

// view is a stage at one moment, copied on its loop.
type view struct {
	now       int64
	out       stats.Model // model computes the rest
	stats     stageStats
	latencies []histogram.Delta // of all of stats.seconds.cells
	settings  policy.Settings
	inputs    []tensor.Spec
	workers   []fitness
}

func (v *view) takeLearned(l auto.Learned) {
	out := stats.Learned{Costs: []stats.LearnedCost{}, Slowdown: l.Slowdown, Tried: []stats.TriedWait{}, OneAtATime: l.OneAtATime}
	for _, c := range l.Costs {
		line := stats.LearnedCost{Rows: c.Rows, MS: ms(c.Time), Batches: c.Batches}
		if most := v.settings.MaxBatchCost; most > 0 { // the size of a batch is its part of the most rows or cost
			line.Rows, line.Cost = 0, c.Rows*most/v.settings.MaxBatchSize
		}
		out.Costs = append(out.Costs, line)
	}
	for _, t := range l.Tried {
		out.Tried = append(out.Tried, stats.TriedWait{WaitMS: ms(t.Wait), OneAtATime: t.OneAtATime, Latency: t.Latency})
	}
	v.out.WaitTimeMS, v.out.Learned = ms(l.Wait), out
}

// lookAtStage copies a stage for a snapshot, and changes nothing. The copy also counts
// finished batches that the books do not know yet.
func (s *Stage) lookAtStage(v *view) {
	r, sizes := s.ring, v.stats.sizes
	v.now = s.loop.now
	v.stats = s.stats
	v.stats.sizes, v.stats.deaths = sizes, nil
	copy(sizes, s.stats.sizes)
	v.copySeconds()
	v.settings, v.inputs, v.workers = s.settings, s.layout.Signature.Inputs, s.listFitness()
	v.out = stats.Model{
		Name: s.name, Signature: s.layout.Signature.String(), Slots: r.layout.Slots, SlotsFree: r.windows.free,
		StateBytes:   s.layout.StateBytes(),
		MaxBatchSize: s.settings.MaxBatchSize, WaitAuto: s.settings.WaitTime == policy.Auto,
		LatencyGoalMS: ms(s.settings.LatencyGoal), UptimeS: time.Since(s.since).Seconds(), Loop: s.loop.number,
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
	v.takeLearned(s.batcher.Learned())
	v.stats.rollSecond(v.now, s.present)
	for _, w := range s.workers {
		if w != nil {
			unread := s.lookAtDone(w, v)
			line := w.statsLine(len(w.mails) - unread)
			line.Batches += uint64(unread)
			if line.InFlight > 0 {
				v.stats.seconds.spreadComputed(min(w.mails[0].begun, v.now), v.now)
			}
			v.out.Workers = append(v.out.Workers, line)
		}
	}
}

func (v *view) copySeconds() {
	for i := range v.stats.seconds.cells {
		c := &v.stats.seconds.cells[i]
		from := len(v.latencies)
		v.latencies = append(v.latencies, c.total...)
		c.total = v.latencies[from:len(v.latencies):len(v.latencies)]
	}
}

// lookAtDone counts a worker's finished batches, which the loop has not read yet, in the copy.
func (s *Stage) lookAtDone(w *WorkerSession, v *view) (batches int) {
	ahead := w.done // a copy: the ring does not change
	n, err := ahead.Pending()
	if w.faults.has(brokeProtocol) || err != nil {
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
		v.stats.seconds.spreadComputed(started, finished)
		for _, q := range p.requests {
			if !s.ring.stillHas(q, p.batch) {
				continue
			}
			info, word := s.ring.slot(q.head), s.ring.board.Word(q.head)
			switch {
			case info.state == running && word.Generation() == q.gen:
				v.stats.countFinished(info, word.Status(), started, finished)
				v.out.SlotsRunning -= int(info.commit.Rows)
			case info.state == held:
				v.out.SlotsHeld -= int(info.commit.Rows)
			}
		}
		batches++
	}
	return batches
}

func (v *view) model() stats.Model {
	out, st := v.out, &v.stats
	out.Requests, out.Requeued, out.Batches, out.Rows = st.requests, st.requeued, st.batches, st.rows
	out.Isolated, out.WorkersSuspended, out.StateBegun = st.isolated, st.suspended, st.begun
	out.WorkersAttached, out.WorkersLost, out.WorkersHung, out.Offenders = st.attached, st.lost, st.hung, st.offenders
	out.Policy = v.settings.Policy(v.inputs)
	out.ReadyWorkers, out.NotReady = countReady(v.workers)
	out.Windows = st.seconds.lastSeconds(v.now, len(out.Workers))
	out.Latency = stats.Latency{
		Queue: percentiles(&st.queue), Dispatch: percentiles(&st.dispatch),
		Compute: percentiles(&st.compute), Total: percentiles(&st.total),
	}
	out.Histograms = stats.Histograms{
		Queue: bucketsOf(&st.queue), Dispatch: bucketsOf(&st.dispatch), Compute: bucketsOf(&st.compute), Total: bucketsOf(&st.total),
	}
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
		if v.settings.MaxBatchCost > 0 {
			out.BatchSize.AvgCost = float64(st.cost) / float64(st.batches)
		}
	}
	for i, n := range st.reasons {
		if n > 0 {
			out.Reasons[batcher.Reason(i).String()] = n
		}
	}
	return out
}

func (w *WorkerSession) statsLine(inFlight int) stats.Worker {
	state := w.state.String()
	switch {
	case w.state == workerAwaited:
		state = workerDying.String()
	case w.state == workerServing && inFlight > 0:
		state = "busy"
	case w.state == workerServing:
		state = "idle"
	}
	return stats.Worker{
		ID: int(w.id), Name: w.Label(), Pid: w.Pid, GPU: w.info.GPU, State: state, SinceS: time.Since(w.since).Seconds(),
		InFlight: inFlight, Lanes: w.desc.Lanes, Batches: w.batches, Rounds: w.box.Rounds.Load(), BusyS: w.computed.Seconds(), Restarts: w.restarts,
	}
}

func percentiles(h *histogram.Histogram) stats.Percentiles {
	return stats.Percentiles{
		Avg: ms(h.Mean()), P50: ms(h.Quantile(0.5)), P90: ms(h.Quantile(0.9)), P99: ms(h.Quantile(0.99)), Max: ms(h.Max()),
	}
}

func bucketsOf(h *histogram.Histogram) stats.Histogram {
	out := stats.Histogram{Count: h.Count(), SumS: h.Sum().Seconds(), Buckets: []stats.Bucket{}}
	for _, b := range h.Buckets() {
		out.Buckets = append(out.Buckets, stats.Bucket{UpperS: b.Upper.Seconds(), Count: b.Count})
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (r *Ring) lookAtWhole(v *view) {
	v.now = r.loop.now
	v.stats = *r.whole
	v.stats.sizes, v.stats.deaths = nil, nil
	v.copySeconds()
	v.stats.rollSecond(v.now, 0)
	v.out = stats.Model{
		Slots: r.layout.Slots, SlotsFree: r.windows.free, Clients: len(r.clients), Loop: r.loop.number,
		UptimeS:     time.Since(r.stages[0].since).Seconds(),
		SlotsQueued: r.rows[queued], SlotsRunning: r.rows[running], SlotsHeld: r.rows[held], Workers: []stats.Worker{},
	}
}
