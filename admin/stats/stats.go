// SPDX-License-Identifier: Apache-2.0

// Package stats has a broker's statistics as plain data. `ringbatch stats --json`
// prints them; docs/stats.md explains each key. New releases only add keys.
//
// The broker fills these types; package admin fetches them.
package stats

import (
	"fmt"

	"github.com/ringbatch/ringbatch/policy"
)

// Broker has all statistics of a broker.
type Broker struct {
	Pid      int     `json:"pid"`
	Socket   string  `json:"socket"`
	Epoch    uint64  `json:"epoch"`
	UptimeS  float64 `json:"uptime_s"`
	Draining bool    `json:"draining"`
	Models   []Model `json:"models"`            // sorted by name
	Aliases  []Alias `json:"aliases,omitempty"` // sorted by name
	Loops    []Loop  `json:"loops"`

	Processes []Process `json:"processes"` // started by the broker
	MPS       string    `json:"mps"`

	Weights []Weights `json:"weights,omitempty"` // that were published, sorted by model
}

// Weights are the live weights of a model.
type Weights struct {
	Model     string     `json:"model"`
	Version   uint32     `json:"version"` // in force; 0: none yet
	Last      uint32     `json:"last"`    // the latest that was ever published
	AgeS      float64    `json:"age_s"`   // since the latest was published
	Withdrawn uint32     `json:"withdrawn,omitempty"`
	Reason    string     `json:"reason,omitempty"` // of the withdrawal
	Tensors   int        `json:"tensors"`
	Bytes     int64      `json:"bytes"`               // of all buffers
	Publisher int        `json:"publisher,omitempty"` // its pid; 0: there is none now
	Followers []Follower `json:"followers,omitempty"`
}

// Lag is how many versions the slowest worker is behind. A worker loads a version with its next batch.
func (w *Weights) Lag() (most uint32) {
	for _, f := range w.Followers {
		if f.Version < w.Version {
			most = max(most, w.Version-f.Version)
		}
	}
	return most
}

// String is the version in force and its age.
func (w *Weights) String() string {
	return fmt.Sprintf("weights: version %d, %.1f s old", w.Version, w.AgeS)
}

// Follower is a worker that follows the weights of a model.
type Follower struct {
	Pid     int    `json:"pid"`
	Name    string `json:"name,omitempty"`
	Version uint32 `json:"version"` // of its last batch; 0: none yet
}

// NoMPS begins Broker.MPS if MPS was asked for and is missing; the reason follows.
const NoMPS = "not available: "

// Model returns the statistics of a model, or nil.
func (b *Broker) Model(name string) *Model {
	for i := range b.Models {
		if b.Models[i].Name == name {
			return &b.Models[i]
		}
	}
	return nil
}

// Alias is an alias with the shares of its models.
type Alias struct {
	Name string        `json:"name"`
	To   []AliasTarget `json:"to"`
}

// AliasTarget is a model of an alias.
type AliasTarget struct {
	Model        string  `json:"model"`
	SharePercent float64 `json:"share_percent"`
	Clients      int     `json:"clients"` // attached to this model by the alias
}

// Model has a model's statistics.
type Model struct {
	Name         string  `json:"name"`
	Signature    string  `json:"signature"`
	Slots        int     `json:"slots"`
	SlotsFree    int     `json:"slots_free"` // not leased to a client
	MaxBatchSize int     `json:"max_batch_size"`
	WaitTimeMS   float64 `json:"wait_time_ms"` // in force now
	WaitAuto     bool    `json:"wait_auto"`    // chosen by the batcher
	// LatencyGoalMS is latency_goal; 0: none.
	LatencyGoalMS float64 `json:"latency_goal_ms"`
	Learned       Learned `json:"learned"`
	UptimeS       float64 `json:"uptime_s"`
	Loop          int     `json:"loop"` // index of Broker.Loops

	// Stages of a pipeline: the names of their entries, which follow this one. A stage
	// counts a request as ended OK when the next stage gets it.
	Stages []string `json:"stages,omitempty"`

	Policy policy.Policy `json:"policy"` // every setting that is in force

	// ReadyWorkers are idle, or in a batch that does not take unusually long.
	ReadyWorkers int    `json:"ready_workers"`
	NotReady     string `json:"not_ready,omitempty"` // why no worker is ready

	Staffing *Staffing `json:"staffing,omitempty"` // nil: the broker starts no workers of it

	// Windows are the last 1, 10 and 60 whole seconds.
	Windows []Window `json:"windows"`

	// Slots with waiting rows, with rows at a worker, and with rows that ended early
	// while a worker still has them. Clients fill or read the other leased slots.
	SlotsQueued  int `json:"slots_queued"`
	SlotsRunning int `json:"slots_running"`
	SlotsHeld    int `json:"slots_held"`

	Clients     int               `json:"clients"`
	QueueLength int               `json:"queue_length"` // requests
	QueueRows   int               `json:"queue_rows"`
	Requests    uint64            `json:"requests"` // accepted commits
	Ended       map[string]uint64 `json:"ended"`    // by status
	Requeued    uint64            `json:"requeued"` // after a worker's death
	Isolated    uint64            `json:"isolated"` // run again in smaller batches, after their batch failed as a whole
	Batches     uint64            `json:"batches"`
	Rows        uint64            `json:"rows"`
	// Of a model with state: the bytes of all slots' states, and rows that were sent with a
	// state of zero, because a sequence began or was reset, or the request is of none.
	StateBytes int64             `json:"state_bytes,omitempty"`
	StateBegun uint64            `json:"state_begun,omitempty"`
	BatchSize  BatchSize         `json:"batch_size"`
	Reasons    map[string]uint64 `json:"dispatch_reasons"`
	Latency    Latency           `json:"latency_ms"`
	Histograms Histograms        `json:"latency_buckets"`

	WorkersAttached  uint64   `json:"workers_attached"` // ever
	WorkersLost      uint64   `json:"workers_lost"`
	WorkersHung      uint64   `json:"workers_hung"`
	WorkersSuspended uint64   `json:"workers_suspended"` // times that a worker failed batches which others ran
	Offenders        uint64   `json:"offenders"`         // peers disconnected for breaking the protocol
	Workers          []Worker `json:"workers"`
}

// Staffing says whether a model has workers. The broker starts them for a request, and ends
// those that nobody needs.
type Staffing struct {
	State         string      `json:"state"` // asleep, waking, awake, ending
	Why           string      `json:"why"`   // of the state
	SinceS        float64     `json:"since_s"`
	Failed        string      `json:"failed,omitempty"` // why the last start failed, for 10 s after it
	IdleS         float64     `json:"idle_s,omitempty"` // without a request, before it sleeps
	Keep          bool        `json:"keep,omitempty"`
	Least         int         `json:"least,omitempty"` // of Instances, if they follow the load
	Most          int         `json:"most,omitempty"`
	Instances     int         `json:"instances,omitempty"`
	Sleeps        uint64      `json:"sleeps"`
	Wakes         uint64      `json:"wakes"`
	FailedWakes   uint64      `json:"failed_wakes"`
	WakeMS        float64     `json:"wake_ms"` // the last time from the start to the first worker
	LongestWakeMS float64     `json:"longest_wake_ms"`
	Memory        []GPUMemory `json:"memory,omitempty"` // declared or measured
}

// GPUMemory is the memory of a GPU that a model's workers take.
type GPUMemory struct {
	GPU   int   `json:"gpu"`
	Bytes int64 `json:"bytes"`
	Held  bool  `json:"held"` // now
}

// IsAsleep says that a request starts the model's workers.
func (s *Staffing) IsAsleep() bool { return s != nil && s.State != "awake" && s.Failed == "" }

// Learned has the batcher's measurements of the model.
type Learned struct {
	Costs []LearnedCost `json:"costs"` // of a batch, by its rows
	// Slowdown is the factor of a batch's duration with 0, 1, 2 … other workers busy.
	Slowdown []float64 `json:"slowdown"`
	// Tried has the latency that other waits would have given the last requests, with
	// wait_time auto.
	Tried []TriedWait `json:"tried"`
	// OneAtATime: batches that are not full go one at a time now.
	OneAtATime bool `json:"one_at_a_time,omitempty"`
}

// LearnedCost is the duration of a batch from dispatch to end, with no other worker
// busy.
type LearnedCost struct {
	Rows    int     `json:"rows,omitempty"`
	Cost    int     `json:"cost,omitempty"` // with max_batch_cost, instead of rows
	MS      float64 `json:"ms"`
	Batches int     `json:"batches"` // seen
}

// Size is the batch's size as a text.
func (c LearnedCost) Size() string {
	if c.Cost > 0 {
		return fmt.Sprintf("cost %d", c.Cost)
	}
	return fmt.Sprintf("%d rows", c.Rows)
}

// TriedWait is a wait and its latency, as a multiple of the latency without a wait.
type TriedWait struct {
	WaitMS     float64 `json:"wait_ms"`
	OneAtATime bool    `json:"one_at_a_time,omitempty"` // no wait, but batches that are not full one at a time
	Latency    float64 `json:"latency"`
}

// Window has the statistics of the last whole seconds.
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
	Busy         float64       `json:"busy"` // share of the workers' time spent computing, 0..1
}

// WindowLatency is in milliseconds.
type WindowLatency struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

// Window returns the window of that many seconds; empty if there is none.
func (m *Model) Window(seconds int) Window {
	for _, w := range m.Windows {
		if w.Seconds == seconds {
			return w
		}
	}
	return Window{Seconds: seconds}
}

// Histograms are the parts of Latency. Their counts add up over models, brokers and
// time.
type Histograms struct {
	Queue    Histogram `json:"queue"`
	Dispatch Histogram `json:"dispatch"`
	Compute  Histogram `json:"compute"`
	Total    Histogram `json:"total"`
}

// Histogram has 16 buckets per doubling, the same everywhere, without empty ones.
type Histogram struct {
	Count   uint64   `json:"count"`
	SumS    float64  `json:"sum_s"`
	Buckets []Bucket `json:"buckets"`
}

// Bucket counts durations of at most UpperS seconds, above the bucket before.
type Bucket struct {
	UpperS float64 `json:"le_s"`
	Count  uint64  `json:"n"`
}

// Loop is an event loop of the broker. Each serves some of the models.
type Loop struct {
	Models    int    `json:"models"`
	Rounds    uint64 `json:"rounds"`    // wake-ups
	Decisions uint64 `json:"decisions"` // of the models' batchers
	Timers    uint64 `json:"timers"`    // expired
	Turns     uint64 `json:"turns"`     // of clients with more commits than a turn reads
}

// BatchSize is in rows.
type BatchSize struct {
	Avg       float64        `json:"avg"`
	AvgCost   float64        `json:"avg_cost,omitempty"` // with max_batch_cost
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
	State    string  `json:"state"` // idle, busy, spare, suspended, dying, quarantined
	SinceS   float64 `json:"since_s"`
	InFlight int     `json:"in_flight"` // batches
	Lanes    int     `json:"lanes"`     // batches that it runs at once
	Batches  uint64  `json:"batches"`
	Rounds   uint64  `json:"rounds"` // of all its rows in their lanes; 0: it does not say
	BusyS    float64 `json:"busy_s"`
	Restarts int     `json:"restarts"` // earlier workers of this name
}

// LanesInUse is how many of the worker's lanes run a batch.
func (w *Worker) LanesInUse() int { return min(w.InFlight, w.Lanes) }

// Doing is its state, of a worker with several lanes how many run, and how many rounds a row took.
func (w *Worker) Doing() string {
	doing := w.State
	if w.Lanes > 1 {
		doing += fmt.Sprintf(" %d/%d", w.LanesInUse(), w.Lanes)
	}
	if w.Rounds > 0 {
		doing += fmt.Sprintf(", %.1f rounds/row", float64(w.Rounds)/float64(max(w.Batches, 1)))
	}
	return doing
}

// Process is a worker process that the broker started.
type Process struct {
	Name     string `json:"name"`
	Model    string `json:"model,omitempty"`
	Pid      int    `json:"pid"`   // 0 while it does not run
	State    string `json:"state"` // starting, running, waiting (to be started again), stopped
	GPU      *int   `json:"gpu,omitempty"`
	Spare    bool   `json:"spare,omitempty"` // warm, without batches, until a worker is lost
	Restarts int    `json:"restarts"`
	// Attached: the process, or an earlier one in its place, has attached. Sessions are
	// the attached workers of the process and its children.
	Attached     bool    `json:"attached"`
	Sessions     int     `json:"sessions"`
	Client       bool    `json:"client,omitempty"`   // a gateway: it serves no batches
	FailedStarts int     `json:"failed_starts"`      // in a row, that ended before attaching
	SinceS       float64 `json:"since_s"`            // in this state
	LastEnd      string  `json:"last_end,omitempty"` // reason of the last end
	Command      string  `json:"command"`
}

// Batches are finished batches of a model, oldest first. Times are Unix microseconds.
type Batches struct {
	Count   uint64  `json:"count"`  // ever; since of the next question
	NowUS   int64   `json:"now_us"` // the broker's clock
	Batches []Batch `json:"batches"`
}

// Batch is a finished batch.
type Batch struct {
	Worker     int   `json:"worker"` // Worker.ID
	Rows       int   `json:"rows"`
	Requests   int   `json:"requests"`
	PostedUS   int64 `json:"posted_us"`
	StartedUS  int64 `json:"started_us"`
	FinishedUS int64 `json:"finished_us"`
}

// Trace has every request of a model that a worker answered in a short time. Times
// are Unix microseconds.
type Trace struct {
	Model    string          `json:"model"`
	FromUS   float64         `json:"from_us"`
	ToUS     float64         `json:"to_us"`
	Missed   int             `json:"missed"` // requests without room in the trace
	Requests []TracedRequest `json:"requests"`
	Notes    []TraceNote     `json:"notes"` // workers that came and went
}

// TracedRequest is a request of a trace. 0: the client did not record the time.
type TracedRequest struct {
	Client       string  `json:"client"`
	ClientID     int     `json:"client_id"`
	Worker       int     `json:"worker"`
	Batch        uint64  `json:"batch"`
	Rows         int     `json:"rows"`
	End          string  `json:"end"`
	Version      uint32  `json:"weights_version,omitempty"` // of the live weights that answered it
	AskedUS      float64 `json:"asked_us,omitempty"`        // the client began to claim slots
	ClaimedUS    float64 `json:"claimed_us,omitempty"`      // the client had slots
	CommittedUS  float64 `json:"committed_us"`
	DispatchedUS float64 `json:"dispatched_us"`
	StartedUS    float64 `json:"started_us"`
	FinishedUS   float64 `json:"finished_us"`
	WokenUS      float64 `json:"woken_us,omitempty"` // the client saw the end
}

// TraceNote is another event during a trace.
type TraceNote struct {
	AtUS float64 `json:"at_us"`
	Text string  `json:"text"`
}
