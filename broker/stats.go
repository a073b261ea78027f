package broker

import (
	"os"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/histogram"
	"github.com/ringbatch/ringbatch/status"
)

// Stats is everything the broker counts; as JSON it is what `ringbatch stats
// --json` prints. Keys are only ever added.
type Stats struct {
	Pid      int          `json:"pid"`
	Socket   string       `json:"socket"`
	Epoch    uint64       `json:"epoch"`
	UptimeS  float64      `json:"uptime_s"`
	Draining bool         `json:"draining"`
	Models   []ModelStats `json:"models"`

	Processes []ProcessStats `json:"processes"` // the workers that the broker started
	MPS       string         `json:"mps"`
}

// ModelStats is one model's part.
type ModelStats struct {
	Name         string  `json:"name"`
	Signature    string  `json:"signature"`
	Slots        int     `json:"slots"`
	SlotsFree    int     `json:"slots_free"` // not leased to a client
	MaxBatchSize int     `json:"max_batch_size"`
	WaitTimeMS   float64 `json:"wait_time_ms"`
	UptimeS      float64 `json:"uptime_s"`

	Clients     int               `json:"clients"`
	QueueLength int               `json:"queue_length"` // requests
	QueueRows   int               `json:"queue_rows"`
	Requests    uint64            `json:"requests"` // accepted commits
	Ended       map[string]uint64 `json:"ended"`    // by status
	Requeued    uint64            `json:"requeued"`
	Batches     uint64            `json:"batches"`
	Rows        uint64            `json:"rows"`
	BatchSize   BatchSizeStats    `json:"batch_size"`
	Reasons     map[string]uint64 `json:"dispatch_reasons"`
	Latency     LatencyStats      `json:"latency_ms"`

	WorkersLost uint64        `json:"workers_lost"`
	WorkersHung uint64        `json:"workers_hung"`
	Offenders   uint64        `json:"offenders"` // peers thrown out for breaking the protocol
	Workers     []WorkerStats `json:"workers"`
}

// BatchSizeStats is in rows.
type BatchSizeStats struct {
	Avg       float64        `json:"avg"`
	Histogram map[int]uint64 `json:"histogram"`
}

// LatencyStats splits the time a request spends between commit and answer.
type LatencyStats struct {
	Queue    Percentiles `json:"queue"`    // commit → dispatch
	Dispatch Percentiles `json:"dispatch"` // dispatch → the worker starts
	Compute  Percentiles `json:"compute"`  // the worker's function
	Total    Percentiles `json:"total"`    // commit → answered
}

// Percentiles are in milliseconds.
type Percentiles struct {
	Avg float64 `json:"avg"`
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// WorkerStats is one worker.
type WorkerStats struct {
	ID       int     `json:"id"`
	Name     string  `json:"name"`
	Pid      int     `json:"pid"`
	GPU      string  `json:"gpu,omitempty"`
	State    string  `json:"state"` // idle, busy, dying, quarantined
	SinceS   float64 `json:"since_s"`
	InFlight int     `json:"in_flight"` // batches
	Batches  uint64  `json:"batches"`
	BusyS    float64 `json:"busy_s"`
	Restarts int     `json:"restarts"` // of workers of this name, before this one
}

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
func (b *Broker) Snapshot() Stats {
	s := Stats{Pid: os.Getpid(), Socket: b.cfg.Socket, Epoch: b.epoch, UptimeS: time.Since(b.started).Seconds(), Draining: b.models.drains(), Models: []ModelStats{}}
	for _, m := range b.models.list() {
		var ms ModelStats
		if !m.do(func() { ms = m.stage.snapshot() }) {
			continue
		}
		for i := range ms.Workers {
			w := &ms.Workers[i]
			w.Restarts = max(w.Restarts, b.super.restarts(w.Pid))
		}
		s.Models = append(s.Models, ms)
	}
	s.Processes, s.MPS = b.super.snapshot()
	return s
}

func (s *stage) snapshot() ModelStats {
	s.touch()
	s.catchUp() // what they finished unseen
	st, r := &s.stats, s.ring
	out := ModelStats{
		Name: s.cfg.Name, Signature: s.cfg.Signature.String(), Slots: r.layout.Slots, SlotsFree: r.windows.free,
		MaxBatchSize: s.cfg.Policy.MaxBatchSize, WaitTimeMS: ms(s.cfg.Policy.WaitTime), UptimeS: time.Since(s.since).Seconds(),
		Clients: len(r.clients), QueueLength: s.batcher.Queued(), QueueRows: s.batcher.QueuedRows(),
		Requests: st.requests, Ended: map[string]uint64{}, Requeued: st.requeued, Batches: st.batches, Rows: st.rows,
		BatchSize: BatchSizeStats{Histogram: map[int]uint64{}}, Reasons: map[string]uint64{},
		WorkersLost: st.lost, WorkersHung: st.hung, Offenders: st.offenders, Workers: []WorkerStats{},
		Latency: LatencyStats{percentiles(&st.queue), percentiles(&st.dispatch), percentiles(&st.compute), percentiles(&st.total)},
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

func (w *workerSession) snapshot() WorkerStats {
	state := "idle"
	switch {
	case w.quarantined:
		state = "quarantined"
	case w.dying:
		state = "dying"
	case len(w.mails) > 0:
		state = "busy"
	}
	return WorkerStats{
		ID: int(w.id), Name: w.label(), Pid: w.pid, GPU: w.info.GPU, State: state, SinceS: time.Since(w.since).Seconds(),
		InFlight: len(w.mails), Batches: w.batches, BusyS: w.computed.Seconds(), Restarts: w.restarts,
	}
}

func percentiles(h *histogram.Histogram) Percentiles {
	return Percentiles{Avg: ms(h.Mean()), P50: ms(h.Quantile(0.5)), P90: ms(h.Quantile(0.9)), P99: ms(h.Quantile(0.99)), Max: ms(h.Max())}
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
