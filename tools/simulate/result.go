// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"encoding/json"
	"math"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// Result is the result of a simulation.
type Result struct {
	Span              time.Duration  `json:"-"` // from the first commit to the last answer
	SpanSeconds       float64        `json:"span_seconds"`
	Outcomes          Outcomes       `json:"outcomes"`
	RequestsPerSecond float64        `json:"requests_per_second"` // completed in time
	RowsPerSecond     float64        `json:"rows_per_second"`     // run by workers
	Latency           Latency        `json:"latency_ms"`          // from commit to answer, of completed requests
	Batches           int            `json:"batches"`
	MeanBatchRows     float64        `json:"mean_batch_rows"`
	MeanBatchTokens   float64        `json:"mean_batch_tokens,omitempty"`
	Rounds            int            `json:"rounds,omitempty"` // of workers with lanes
	MeanRoundRows     float64        `json:"mean_round_rows,omitempty"`
	Whole             *Result        `json:"whole_batches,omitempty"` // the same load without lanes
	BatchSizes        []SizeCount    `json:"batch_sizes"`             // ascending; only sizes that occurred
	Reasons           Reasons        `json:"dispatched_because"`
	Workers           []WorkerResult `json:"workers"`
	Levels            []LevelResult  `json:"levels,omitempty"` // with more than one priority level

	latencies []int64       // ascending, nanoseconds
	cfg       *Config       // of a run that the command reports
	arrivals  time.Duration // from the first commit to the last
}

// Outcomes says how the requests ended.
type Outcomes struct {
	Completed int `json:"completed"`
	Late      int `json:"late"`      // its deadline passed while it ran
	Expired   int `json:"expired"`   // its deadline passed in the queue
	TimedOut  int `json:"timed_out"` // its level's timeout passed in the queue
	Refused   int `json:"refused"`   // its level's queue was full, or it would have been late
}

// Latency of completed requests.
type Latency struct {
	Avg, P50, P90, P95, P99, P999, Max time.Duration
}

// SizeCount is the number of batches of one size.
type SizeCount struct {
	Rows    int `json:"rows"`
	Batches int `json:"batches"`
}

// Reasons counts batches by the rule that sent them out.
type Reasons struct {
	Full      int `json:"full"`
	Preferred int `json:"preferred"`
	Deadline  int `json:"deadline"`
	Nobody    int `json:"nobody"`
}

// WorkerResult sums up one worker.
type WorkerResult struct {
	Utilisation float64       `json:"utilisation"` // share of the span in which it was busy
	Batches     int           `json:"batches"`
	Rows        int           `json:"rows"`
	Busy        time.Duration `json:"-"`
}

// LevelResult sums up one priority level.
type LevelResult struct {
	Completed int     `json:"completed"`
	Latency   Latency `json:"latency_ms"`
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// MarshalJSON writes milliseconds.
func (l Latency) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]float64{
		"avg": milliseconds(l.Avg), "p50": milliseconds(l.P50), "p90": milliseconds(l.P90),
		"p95": milliseconds(l.P95), "p99": milliseconds(l.P99), "p99.9": milliseconds(l.P999), "max": milliseconds(l.Max),
	})
}

// Quantile is the latency that the share q of the completed requests did not exceed; 0 if none completed.
func (r *Result) Quantile(q float64) time.Duration { return quantile(r.latencies, q) }

// Within is the number of completed requests that took at most limit.
func (r *Result) Within(limit time.Duration) int {
	n, _ := slices.BinarySearch(r.latencies, int64(limit)+1)
	return n
}

// quantile is the nearest rank: the smallest value with at least q·n of the n ascending values up to it.
func quantile(ascending []int64, q float64) time.Duration {
	n := len(ascending)
	if n == 0 {
		return 0
	}
	i := int(math.Ceil(q*float64(n)-1e-9)) - 1
	return time.Duration(ascending[min(max(i, 0), n-1)])
}

func summarise(ascending []int64) (l Latency) {
	if len(ascending) == 0 {
		return l
	}
	sum := 0.0
	for _, x := range ascending {
		sum += float64(x)
	}
	at := func(q float64) time.Duration { return quantile(ascending, q) }
	return Latency{
		Avg: time.Duration(sum / float64(len(ascending))), P50: at(0.5), P90: at(0.9),
		P95: at(0.95), P99: at(0.99), P999: at(0.999), Max: at(1),
	}
}

// stats collects while the simulation runs.
type stats struct {
	first, last batcher.Time
	lastCommit  batcher.Time
	outcomes    Outcomes
	latencies   []int64
	byLevel     [][]int64 // only with several levels
	sizes       []int     // by rows
	reasons     [5]int
	rows, cost  int
}

func newStats(cfg *Config) stats {
	s := stats{
		first:     batcher.Never,
		latencies: make([]int64, 0, min(cfg.Requests, 1<<22)),
		sizes:     make([]int, cfg.Policy.MaxBatchSize+1),
	}
	if n := len(cfg.Policy.Levels); n > 1 {
		s.byLevel = make([][]int64, n)
	}
	return s
}

// batch counts a batch.
func (s *stats) batch(d *batcher.Dispatch) {
	s.sizes[d.Rows]++
	s.reasons[d.Why]++
	s.rows += d.Rows
	s.cost += d.Cost
}

// answer counts a request whose answer comes at the given time.
func (s *stats) answer(f *flight, seen batcher.Time) {
	if seen > f.deadline {
		s.outcomes.Late++
		return
	}
	s.outcomes.Completed++
	s.latencies = append(s.latencies, int64(seen-f.committed))
	if s.byLevel != nil {
		s.byLevel[f.level] = append(s.byLevel[f.level], int64(seen-f.committed))
	}
}

func (s *stats) result() *Result {
	slices.Sort(s.latencies)
	r := &Result{
		Outcomes:  s.outcomes,
		latencies: s.latencies,
		Reasons: Reasons{
			Full: s.reasons[batcher.Full], Preferred: s.reasons[batcher.Preferred],
			Deadline: s.reasons[batcher.Deadline], Nobody: s.reasons[batcher.Nobody],
		},
	}
	for rows, n := range s.sizes {
		if n > 0 {
			r.Batches += n
			r.BatchSizes = append(r.BatchSizes, SizeCount{rows, n})
		}
	}
	if r.Batches > 0 {
		r.MeanBatchRows = float64(s.rows) / float64(r.Batches)
		r.Span = time.Duration(s.last - s.first)
		r.arrivals = time.Duration(s.lastCommit - s.first)
		r.SpanSeconds = r.Span.Seconds()
	}
	if r.Span > 0 {
		r.RequestsPerSecond = float64(s.outcomes.Completed) / r.Span.Seconds()
		r.RowsPerSecond = float64(s.rows) / r.Span.Seconds()
	}
	r.Latency = summarise(s.latencies)
	for _, latencies := range s.byLevel {
		slices.Sort(latencies)
		r.Levels = append(r.Levels, LevelResult{len(latencies), summarise(latencies)})
	}
	return r
}
