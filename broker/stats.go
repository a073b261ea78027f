package broker

import (
	"os"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/status"
)

// stageStats is the running count.
type stageStats struct {
	requests, requeued, batches, rows uint64
	attached, lost, hung, offenders   uint64
	byStatus                          [64]uint64
	sizes                             []uint64 // by rows
	reasons                           [8]uint64
	queue, dispatch, compute, total   histogram.Histogram
	deaths                            map[string]int // by worker name
}

func (s *stageStats) init(maxBatch int) {
	s.sizes = make([]uint64, maxBatch+1)
	s.deaths = map[string]int{}
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
	s.queue.Add(time.Duration(info.dispatched - info.commit.Committed))
	s.dispatch.Add(time.Duration(started - info.dispatched))
	s.compute.Add(time.Duration(finished - started))
	s.total.Add(time.Duration(finished - info.commit.Committed))
}

// Snapshot is the present state, as `ringbatch stats` shows it. It may be
// called from any goroutine while Serve runs; after that it has no models.
// Every model is asked for itself, so that no loop is held up by others'.
func (b *Broker) Snapshot() stats.Broker {
	s := stats.Broker{Pid: os.Getpid(), Socket: b.cfg.Socket, Epoch: b.epoch, UptimeS: time.Since(b.started).Seconds(), Draining: b.models.drains(), Models: []stats.Model{}, Loops: []stats.Loop{}}
	for _, m := range b.models.list() {
		var ms stats.Model
		if !m.do(func() { ms = m.stage.snapshot() }) {
			continue
		}
		for i := range ms.Workers {
			w := &ms.Workers[i]
			w.Restarts = max(w.Restarts, b.super.Restarts(w.Pid))
		}
		s.Models = append(s.Models, ms)
	}
	for _, l := range b.loops {
		l.do(func() { s.Loops = append(s.Loops, l.snapshot()) })
	}
	s.Processes, s.MPS = b.super.Snapshot()
	return s
}

func (s *stage) snapshot() stats.Model {
	s.touch()
	s.catchUp() // what they finished unseen
	st, r := &s.stats, s.ring
	out := stats.Model{
		Name: s.cfg.Name, Signature: s.cfg.Signature.String(), Slots: r.layout.Slots, SlotsFree: r.windows.free,
		MaxBatchSize: s.settings.MaxBatchSize, WaitTimeMS: ms(s.settings.WaitTime), UptimeS: time.Since(s.since).Seconds(), Loop: s.loop.number,
		Clients: len(r.clients), QueueLength: s.batcher.Queued(), QueueRows: s.batcher.QueuedRows(),
		Requests: st.requests, Ended: map[string]uint64{}, Requeued: st.requeued, Batches: st.batches, Rows: st.rows,
		BatchSize: stats.BatchSize{Histogram: map[int]uint64{}}, Reasons: map[string]uint64{},
		WorkersLost: st.lost, WorkersHung: st.hung, Offenders: st.offenders, Workers: []stats.Worker{},
		Latency: stats.Latency{Queue: percentiles(&st.queue), Dispatch: percentiles(&st.dispatch), Compute: percentiles(&st.compute), Total: percentiles(&st.total)},
	}
	for i, n := range st.byStatus {
		if n > 0 {
			out.Ended[status.Code(i).Name()] = n
		}
	}
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
	for _, w := range s.workers {
		if w != nil {
			out.Workers = append(out.Workers, w.snapshot())
		}
	}
	return out
}

func (w *workerSession) snapshot() stats.Worker {
	state := "idle"
	switch {
	case w.quarantined:
		state = "quarantined"
	case w.dying || w.verdict > 0:
		state = "dying"
	case len(w.mails) > 0:
		state = "busy"
	}
	return stats.Worker{
		ID: int(w.id), Name: w.label(), Pid: w.pid, GPU: w.info.GPU, State: state, SinceS: time.Since(w.since).Seconds(),
		InFlight: len(w.mails), Batches: w.batches, BusyS: w.computed.Seconds(), Restarts: w.restarts,
	}
}

func percentiles(h *histogram.Histogram) stats.Percentiles {
	return stats.Percentiles{Avg: ms(h.Mean()), P50: ms(h.Quantile(0.5)), P90: ms(h.Quantile(0.9)), P99: ms(h.Quantile(0.99)), Max: ms(h.Max())}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
