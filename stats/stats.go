// SPDX-License-Identifier: Apache-2.0

// Package stats is what a broker counts, as plain data. As JSON it is what
// `ringbatch stats --json` prints; docs/stats.md tells what each key means.
// Keys are only ever added.
//
// The broker fills these types; package admin fetches them.
package stats

import "github.com/ringbatch/ringbatch/policy"

// Broker is everything that one broker counts.
type Broker struct {
	Pid      int     `json:"pid"`
	Socket   string  `json:"socket"`
	Epoch    uint64  `json:"epoch"`
	UptimeS  float64 `json:"uptime_s"`
	Draining bool    `json:"draining"`
	Models   []Model `json:"models"`            // sorted by name
	Aliases  []Alias `json:"aliases,omitempty"` // sorted by name
	Loops    []Loop  `json:"loops"`

	Processes []Process `json:"processes"` // the workers that the broker started
	MPS       string    `json:"mps"`
}

// NoMPS is how Broker.MPS begins where it was asked for and is not there; the reason follows.
const NoMPS = "not available: "

// Model returns the part of one model, or nil if the broker has none of that
// name.
func (b *Broker) Model(name string) *Model {
	for i := range b.Models {
		if b.Models[i].Name == name {
			return &b.Models[i]
		}
	}
	return nil
}

// Alias is a name that stands for models, and what share of the traffic each
// gets.
type Alias struct {
	Name string        `json:"name"`
	To   []AliasTarget `json:"to"`
}

// AliasTarget is one of them.
type AliasTarget struct {
	Model        string  `json:"model"`
	SharePercent float64 `json:"share_percent"`
	Clients      int     `json:"clients"` // that attached to the alias, and have this model
}

// Model is one model's part.
type Model struct {
	Name         string  `json:"name"`
	Signature    string  `json:"signature"`
	Slots        int     `json:"slots"`
	SlotsFree    int     `json:"slots_free"` // not leased to a client
	MaxBatchSize int     `json:"max_batch_size"`
	WaitTimeMS   float64 `json:"wait_time_ms"` // in force now
	WaitAuto     bool    `json:"wait_auto"`    // the batcher chooses it
	// LatencyGoalMS is latency_goal; 0: none.
	LatencyGoalMS float64 `json:"latency_goal_ms"`
	Learned       Learned `json:"learned"`
	UptimeS       float64 `json:"uptime_s"`
	Loop          int     `json:"loop"` // which of Broker.Loops serves it

	// Stages of a pipeline: the names of their lines, which follow this one. A
	// stage counts what it is done with as ended, OK if it was handed on.
	Stages []string `json:"stages,omitempty"`

	Policy policy.Policy `json:"policy"` // every setting that is in force

	// ReadyWorkers can be counted on: they wait for work, or have begun a batch
	// that does not take unusually long.
	ReadyWorkers int    `json:"ready_workers"`
	NotReady     string `json:"not_ready,omitempty"` // why there are none

	// Windows are the last 1, 10 and 60 whole seconds.
	Windows []Window `json:"windows"`

	// Rows of the ring, now: what waits, what a worker has, and what ended
	// early while a worker still has it. The rest of the leased ones are the
	// clients' to fill or to read.
	SlotsQueued  int `json:"slots_queued"`
	SlotsRunning int `json:"slots_running"`
	SlotsHeld    int `json:"slots_held"`

	Clients     int               `json:"clients"`
	QueueLength int               `json:"queue_length"` // requests
	QueueRows   int               `json:"queue_rows"`
	Requests    uint64            `json:"requests"` // accepted commits
	Ended       map[string]uint64 `json:"ended"`    // by status
	Requeued    uint64            `json:"requeued"`
	Batches     uint64            `json:"batches"`
	Rows        uint64            `json:"rows"`
	BatchSize   BatchSize         `json:"batch_size"`
	Reasons     map[string]uint64 `json:"dispatch_reasons"`
	Latency     Latency           `json:"latency_ms"`
	Histograms  Histograms        `json:"latency_buckets"`

	WorkersAttached uint64   `json:"workers_attached"` // ever
	WorkersLost     uint64   `json:"workers_lost"`
	WorkersHung     uint64   `json:"workers_hung"`
	Offenders       uint64   `json:"offenders"` // peers thrown out for breaking the protocol
	Workers         []Worker `json:"workers"`
}

// Learned is what the batcher has found out about the model.
type Learned struct {
	Costs []LearnedCost `json:"costs"` // what a batch takes, by its rows
	// Slowdown is how many times as long it takes with 0, 1, 2 … other workers
	// busy.
	Slowdown []float64 `json:"slowdown"`
	// Tried is what other waits would have done to the latency of the last
	// requests, with wait_time auto.
	Tried []TriedWait `json:"tried"`
	// Apart: batches that are not full go one after the other now.
	Apart bool `json:"apart,omitempty"`
}

// LearnedCost is what a batch of so many rows takes while no other worker is
// busy, from the dispatch to its end.
type LearnedCost struct {
	Rows    int     `json:"rows"`
	MS      float64 `json:"ms"`
	Batches int     `json:"batches"` // seen
}

// TriedWait is a wait and the latency that it would have given, as a multiple of
// that of no wait.
type TriedWait struct {
	WaitMS  float64 `json:"wait_ms"`
	Apart   bool    `json:"apart,omitempty"` // no wait, but batches that are not full one after the other
	Latency float64 `json:"latency"`
}

// Window is what happened in the last whole seconds.
type Window struct {
	Seconds      int           `json:"seconds"`
	MeasuredS    int           `json:"measured_s"` // fewer while the model is younger than the window
	RequestsPerS float64       `json:"requests_per_s"`
	RowsPerS     float64       `json:"rows_per_s"`
	BatchesPerS  float64       `json:"batches_per_s"`
	FailedPerS   float64       `json:"failed_per_s"` // ended other than OK
	Ended        uint64        `json:"ended"`        // requests, however they ended
	Latency      WindowLatency `json:"latency_ms"`   // commit → answered
	RowsPerBatch float64       `json:"rows_per_batch"`
	Busy         float64       `json:"busy"` // share of the workers' time in which they computed, 0..1
}

// WindowLatency is in milliseconds.
type WindowLatency struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// Window is the one of that many seconds; empty if it is not told.
func (m *Model) Window(seconds int) Window {
	for _, w := range m.Windows {
		if w.Seconds == seconds {
			return w
		}
	}
	return Window{Seconds: seconds}
}

// Histograms are the parts of Latency with their counts, which add up over
// models, brokers and time.
type Histograms struct {
	Queue    Histogram `json:"queue"`
	Dispatch Histogram `json:"dispatch"`
	Compute  Histogram `json:"compute"`
	Total    Histogram `json:"total"`
}

// Histogram has 16 buckets per doubling, the same ones everywhere; those that
// are empty are left out.
type Histogram struct {
	Count   uint64   `json:"count"`
	SumS    float64  `json:"sum_s"`
	Buckets []Bucket `json:"buckets"`
}

// Bucket counts durations of at most UpperS seconds that the bucket before it
// does not.
type Bucket struct {
	UpperS float64 `json:"le_s"`
	Count  uint64  `json:"n"`
}

// Loop is one of the loops that serve the models, each some of them.
type Loop struct {
	Models    int    `json:"models"`
	Rounds    uint64 `json:"rounds"`    // times it was awake
	Decisions uint64 `json:"decisions"` // of a model's batcher
	Timers    uint64 `json:"timers"`    // that were due
	Turns     uint64 `json:"turns"`     // of clients that had more to be read than one turn takes
}

// BatchSize is in rows.
type BatchSize struct {
	Avg       float64        `json:"avg"`
	Histogram map[int]uint64 `json:"histogram"`
}

// Latency splits the time a request spends between commit and answer.
type Latency struct {
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

// Worker is one attached worker.
type Worker struct {
	ID       int     `json:"id"`
	Name     string  `json:"name"`
	Pid      int     `json:"pid"`
	GPU      string  `json:"gpu,omitempty"`
	State    string  `json:"state"` // idle, busy, spare, dying, quarantined
	SinceS   float64 `json:"since_s"`
	InFlight int     `json:"in_flight"` // batches
	Batches  uint64  `json:"batches"`
	BusyS    float64 `json:"busy_s"`
	Restarts int     `json:"restarts"` // of workers of this name, before this one
}

// Process is one worker process that the broker started.
type Process struct {
	Name     string `json:"name"`
	Model    string `json:"model,omitempty"`
	Pid      int    `json:"pid"`   // 0 while it does not run
	State    string `json:"state"` // starting, running, waiting (to be started again), stopped
	GPU      *int   `json:"gpu,omitempty"`
	Spare    bool   `json:"spare,omitempty"` // kept warm, without batches, until one of its kind is lost
	Restarts int    `json:"restarts"`
	// Attached tells that it has attached, in this life or another; Sessions are the workers
	// that are attached now, of it and of what it started.
	Attached     bool    `json:"attached"`
	Sessions     int     `json:"sessions"`
	Client       bool    `json:"client,omitempty"`   // it serves no batches: a gateway
	FailedStarts int     `json:"failed_starts"`      // lives in a row that ended before they attached
	SinceS       float64 `json:"since_s"`            // in this state
	LastEnd      string  `json:"last_end,omitempty"` // why it ended last
	Command      string  `json:"command"`
}

// Batches are batches that workers of a model have finished, oldest first.
type Batches struct {
	Count   uint64  `json:"count"`  // ever; what to ask with the next time
	NowUS   int64   `json:"now_us"` // the broker's clock, in Unix microseconds, as all times here
	Batches []Batch `json:"batches"`
}

// Batch is one of them.
type Batch struct {
	Worker     int   `json:"worker"` // Worker.ID
	Rows       int   `json:"rows"`
	Requests   int   `json:"requests"`
	PostedUS   int64 `json:"posted_us"`
	StartedUS  int64 `json:"started_us"`
	FinishedUS int64 `json:"finished_us"`
}

// Trace is what happened to each request of a model that a worker answered in a
// short time. Times are Unix microseconds.
type Trace struct {
	Model    string          `json:"model"`
	FromUS   float64         `json:"from_us"`
	ToUS     float64         `json:"to_us"`
	Missed   int             `json:"missed"` // requests that there was no room for
	Requests []TracedRequest `json:"requests"`
	Notes    []TraceNote     `json:"notes"` // workers that came and went
}

// TracedRequest is one of them.
type TracedRequest struct {
	Client       string  `json:"client"`
	ClientID     int     `json:"client_id"`
	Worker       int     `json:"worker"`
	Batch        uint64  `json:"batch"`
	Rows         int     `json:"rows"`
	End          string  `json:"end"`
	AskedUS      float64 `json:"asked_us,omitempty"`   // the client began to look for slots; 0: it has not told
	ClaimedUS    float64 `json:"claimed_us,omitempty"` // and had them; likewise
	CommittedUS  float64 `json:"committed_us"`
	DispatchedUS float64 `json:"dispatched_us"`
	StartedUS    float64 `json:"started_us"`
	FinishedUS   float64 `json:"finished_us"`
	WokenUS      float64 `json:"woken_us,omitempty"` // the client saw the end; 0: it has not told
}

// TraceNote is something that happened besides.
type TraceNote struct {
	AtUS float64 `json:"at_us"`
	Text string  `json:"text"`
}
