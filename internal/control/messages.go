// Package control is the control plane: msgpack messages in length-prefixed
// frames over a Unix socket, with descriptors by SCM_RIGHTS. It is never on
// the path of a request.
//
// A peer sends one Request and gets one Reply. The connection of an attached
// client or worker stays open: its end is the peer's end.
package control

import "time"

// Version of the messages. A peer of another version is refused.
const Version = 1

// WatchTime is how long the broker leaves OpWatch without an answer: the peer
// then learns that the broker is still there, and asks again.
const WatchTime = 30 * time.Second

// Op says what a Request asks for.
type Op string

const (
	OpClient Op = "client" // attach as a client of a model; descriptors: planes, board (read-only), session, doorbell
	OpWorker Op = "worker" // attach as a worker of a model, declaring it if need be; descriptors: planes, board, session, doorbell
	OpModels Op = "models" // list the models
	OpStats  Op = "stats"  // everything the broker counts
	OpSet    Op = "set"    // change a model's policy
	OpPing   Op = "ping"   // is anybody there
	OpWatch  Op = "watch"  // wait until the models change
)

// Request is what a peer sends.
type Request struct {
	Version int    `msgpack:"version"`
	Op      Op     `msgpack:"op"`
	Model   string `msgpack:"model,omitempty"`
	Name    string `msgpack:"name,omitempty"`   // the peer's own name for itself, for logs and stats
	Window  int    `msgpack:"window,omitempty"` // OpClient: slots wanted
	// OpWorker: what it serves, and the policy to declare the model with if
	// the broker does not know it yet.
	Worker *WorkerInfo `msgpack:"worker,omitempty"`
	Policy *Policy     `msgpack:"policy,omitempty"`
	// OpSet: key=value pairs, taken whole or not at all.
	Set map[string]string `msgpack:"set,omitempty"`
	// OpWatch: the value of Reply.Changes that the peer knows.
	Since uint64 `msgpack:"since,omitempty"`
}

// WorkerInfo is what a worker tells about itself.
type WorkerInfo struct {
	Inputs  []string `msgpack:"inputs"` // tensors as name:dtype[dims]
	Outputs []string `msgpack:"outputs"`
	Depth   int      `msgpack:"depth"` // batches it may hold
	Weight  int      `msgpack:"weight,omitempty"`
	Pad     string   `msgpack:"pad,omitempty"` // "", "fixed", "preferred"
	PadTo   int      `msgpack:"pad_to,omitempty"`
	GPU     string   `msgpack:"gpu,omitempty"` // where it computes, for stats
}

// Policy is a model's batching policy and size as it travels. Zero values
// ask for the broker's defaults.
type Policy struct {
	MaxBatchSize  int        `msgpack:"max_batch_size,omitempty"`
	WaitTime      int64      `msgpack:"wait_time_ns,omitempty"`
	Slots         int        `msgpack:"slots,omitempty"`
	Lease         int64      `msgpack:"lease_ns,omitempty"`
	Preferred     []int      `msgpack:"preferred_batch_sizes,omitempty"`
	Levels        []Level    `msgpack:"levels,omitempty"`
	DefaultLevel  int        `msgpack:"default_level,omitempty"`
	Ageing        int64      `msgpack:"ageing_ns,omitempty"`
	Buckets       [][]uint32 `msgpack:"buckets,omitempty"` // per variable input dimension, in signature order
	PreserveOrder bool       `msgpack:"preserve_order,omitempty"`
	MaxAttempts   int        `msgpack:"max_attempts,omitempty"`
	Ragged        bool       `msgpack:"ragged,omitempty"` // requests of different sizes share a batch
}

// Level is the queue policy of one priority level.
type Level struct {
	MaxQueue       int   `msgpack:"max_queue,omitempty"`
	DefaultTimeout int64 `msgpack:"default_timeout_ns,omitempty"`
	MaxTimeout     int64 `msgpack:"max_timeout_ns,omitempty"`
	Delay          bool  `msgpack:"delay,omitempty"` // on timeout: let through at the end, instead of reject
}

// Reply is the broker's answer.
type Reply struct {
	Code    uint8  `msgpack:"code"` // 0 or a status of package shm
	Message string `msgpack:"message,omitempty"`
	Version int    `msgpack:"version"`
	Pid     int    `msgpack:"pid"`
	Epoch   uint64 `msgpack:"epoch"`

	Attached *Attached `msgpack:"attached,omitempty"`
	Models   []Model   `msgpack:"models,omitempty"`
	Stats    []byte    `msgpack:"stats,omitempty"`   // JSON, as docs/stats.md
	Changes  uint64    `msgpack:"changes,omitempty"` // OpModels, OpWatch: grows whenever the models change
}

// Attached describes the segments whose descriptors come with the reply.
type Attached struct {
	Model       string   `msgpack:"model"`
	Inputs      []string `msgpack:"inputs"`
	Outputs     []string `msgpack:"outputs"`
	Slots       int      `msgpack:"slots"`
	MaxBatch    int      `msgpack:"max_batch"` // rows the segments were laid out for
	Geometry    uint64   `msgpack:"geometry"`
	PlanesSize  int64    `msgpack:"planes_size"`
	BoardSize   int64    `msgpack:"board_size"`
	SessionSize int64    `msgpack:"session_size"`
	FirstSlot   uint32   `msgpack:"first_slot"` // client: its window
	Window      int      `msgpack:"window"`
	FirstGen    uint32   `msgpack:"first_gen"` // client: the generation before its first
	Depth       int      `msgpack:"depth"`     // worker: mails it may hold
	WorkerID    uint32   `msgpack:"worker_id"`
	Policy      Policy   `msgpack:"policy"`
	Notes       []string `msgpack:"notes,omitempty"` // worker: how the policy differs from what it asked for
}

// Model is one line of OpModels.
type Model struct {
	Name    string   `msgpack:"name"`
	Inputs  []string `msgpack:"inputs"`
	Outputs []string `msgpack:"outputs"`
	Policy  Policy   `msgpack:"policy"`
	Workers int      `msgpack:"workers"`
	Clients int      `msgpack:"clients"`
}
