package broker

import (
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/status"
)

// modelStats is the running count.
type modelStats struct {
	requests, requeued, batches, rows uint64
	attached, lost, hung, offenders   uint64
	byStatus                          [64]uint64
	sizes                             []uint64 // by rows
	reasons                           [8]uint64
	queue, dispatch, compute, total   histogram.Histogram
	deaths                            map[string]int // by worker name
}

func (s *modelStats) init(maxBatch int) {
	s.sizes = make([]uint64, maxBatch+1)
	s.deaths = map[string]int{}
}

func (s *modelStats) ended(st status.Code) { s.byStatus[st%64]++ }

func (s *modelStats) dispatched(d *batcher.Dispatch) {
	s.batches++
	s.rows += uint64(d.Rows)
	s.sizes[min(d.Rows, len(s.sizes)-1)]++
	s.reasons[d.Why%8]++
}

func (s *modelStats) finished(info *slotInfo, st status.Code, started, finished int64) {
	s.ended(st)
	s.queue.Add(time.Duration(info.dispatched - info.commit.Committed))
	s.dispatch.Add(time.Duration(started - info.dispatched))
	s.compute.Add(time.Duration(finished - started))
	s.total.Add(time.Duration(finished - info.commit.Committed))
}

// Snapshot is the present state, as `ringbatch stats` shows it. It may be
// called from any goroutine while Serve runs; after that it is empty.
func (b *Broker) Snapshot() (s stats.Broker) {
	b.do(func() { s = b.snapshot() })
	return s
}

// snapshot is Snapshot on the loop.
func (b *Broker) snapshot() stats.Broker {
	s := stats.Broker{Pid: os.Getpid(), Socket: b.cfg.Socket, Epoch: b.epoch, UptimeS: time.Since(b.started).Seconds(), Draining: b.draining, Models: []stats.Model{}}
	for _, m := range b.models {
		for _, w := range m.workers { // what they finished unseen
			if w != nil {
				m.drainDone(w)
			}
		}
		m.touch()
		s.Models = append(s.Models, m.snapshot())
	}
	s.Processes, s.MPS = b.super.Snapshot()
	slices.SortFunc(s.Models, func(x, y stats.Model) int { return strings.Compare(x.Name, y.Name) })
	return s
}

func (m *model) snapshot() stats.Model {
	st := &m.stats
	s := stats.Model{
		Name: m.cfg.Name, Signature: m.cfg.Signature.String(), Slots: m.layout.Slots, SlotsFree: m.windows.free(),
		MaxBatchSize: m.cfg.Policy.MaxBatchSize, WaitTimeMS: ms(m.cfg.Policy.WaitTime), UptimeS: time.Since(m.since).Seconds(),
		Clients: len(m.clients), QueueLength: m.batcher.Queued(), QueueRows: m.batcher.QueuedRows(),
		Requests: st.requests, Ended: map[string]uint64{}, Requeued: st.requeued, Batches: st.batches, Rows: st.rows,
		BatchSize: stats.BatchSize{Histogram: map[int]uint64{}}, Reasons: map[string]uint64{},
		WorkersLost: st.lost, WorkersHung: st.hung, Offenders: st.offenders, Workers: []stats.Worker{},
		Latency: stats.Latency{Queue: percentiles(&st.queue), Dispatch: percentiles(&st.dispatch), Compute: percentiles(&st.compute), Total: percentiles(&st.total)},
	}
	for i, n := range st.byStatus {
		if n > 0 {
			s.Ended[status.Code(i).Name()] = n
		}
	}
	for rows, n := range st.sizes {
		if n > 0 {
			s.BatchSize.Histogram[rows] = n
		}
	}
	if st.batches > 0 {
		s.BatchSize.Avg = float64(st.rows) / float64(st.batches)
	}
	for i, n := range st.reasons {
		if n > 0 {
			s.Reasons[batcher.Reason(i).String()] = n
		}
	}
	for _, w := range m.workers {
		if w != nil {
			s.Workers = append(s.Workers, w.snapshot())
		}
	}
	return s
}

func (w *workerSession) snapshot() stats.Worker {
	state := "idle"
	switch {
	case w.quarantined:
		state = "quarantined"
	case w.dying:
		state = "dying"
	case len(w.mails) > 0:
		state = "busy"
	}
	return stats.Worker{
		ID: int(w.id), Name: w.label(), Pid: w.pid, GPU: w.info.GPU, State: state, SinceS: time.Since(w.since).Seconds(),
		InFlight: len(w.mails), Batches: w.batches, BusyS: w.busy.Seconds(), Restarts: max(w.model.b.super.Restarts(w.pid), w.restarts),
	}
}

func percentiles(h *histogram.Histogram) stats.Percentiles {
	return stats.Percentiles{Avg: ms(h.Mean()), P50: ms(h.Quantile(0.5)), P90: ms(h.Quantile(0.9)), P99: ms(h.Quantile(0.99)), Max: ms(h.Max())}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
