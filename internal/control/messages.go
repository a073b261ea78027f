// SPDX-License-Identifier: Apache-2.0

// Package control is the control plane: msgpack messages in length-prefixed frames over a
// Unix socket, with descriptors by SCM_RIGHTS. No inference request passes through it.
//
// A peer sends one Request and gets one Reply. The connection of an attached client or
// worker stays open: when it ends, the peer has left.
package control

import (
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// The broker serves programs whose messages have a version from Oldest to Version; a
// program sends Version. A new key that old peers may pass over changes neither. Oldest
// rises only when the broker can no longer serve the version below.
const (
	Version = 1
	Oldest  = 1
)

// CheckVersion is the broker's check of a program's version. The error says which side to update.
func CheckVersion(program int) error {
	old := "this program"
	switch {
	case program > Version:
		old = "the broker"
	case program >= Oldest:
		return nil
	}
	return fmt.Errorf("%w: the broker serves control versions %d to %d, this program speaks %d; bring %s up to date",
		status.ErrVersion, Oldest, Version, program, old)
}

// WatchTime is the longest time until the broker answers OpWatch. If nothing has changed,
// the peer asks again.
const WatchTime = 30 * time.Second

// ChangeTime is how long the broker may take to replace processes: each new process
// loads its model.
const ChangeTime = time.Hour

// Op is the operation that a Request asks for.
type Op string

const (
	// Attach. Descriptors: planes, board (read-only for a client), session, doorbell, and device memory if any.
	OpClient Op = "client" // as a client of a model
	OpWorker Op = "worker" // as a worker of a model, which may declare it

	OpWeights  Op = "weights"  // publish or follow the weights of a model
	OpWithdraw Op = "withdraw" // withdraw version Since of a model's weights

	OpModels  Op = "models"  // list the models
	OpStats   Op = "stats"   // the broker's statistics
	OpSet     Op = "set"     // change a model's policy
	OpBatches Op = "batches" // the last batches of a model, as JSON in Reply.Stats
	OpTrace   Op = "trace"   // record a model for Millis, as JSON in Reply.Stats
	OpPing    Op = "ping"    // check that the broker answers
	OpWatch   Op = "watch"   // wait until the models change

	// The broker answers these when they are done, within ChangeTime.
	OpRestart Op = "restart" // replace a model's worker processes, one by one
	OpScale   Op = "scale"   // change the number of a model's worker processes
	OpSleep   Op = "sleep"   // end a model's worker processes until a request comes
	OpWake    Op = "wake"    // start them

	OpAlias    Op = "alias"    // route a name to other models, or to none
	OpHandOver Op = "handover" // give the socket to another broker, then drain
)

// Request is the message of a peer.
type Request struct {
	Version int    `msgpack:"version"`
	Op      Op     `msgpack:"op"`
	Model   string `msgpack:"model,omitempty"`
	Name    string `msgpack:"name,omitempty"`   // the peer's name in logs and statistics
	Window  int    `msgpack:"window,omitempty"` // OpClient: slots wanted
	// OpWorker: the model that it serves.
	Worker *WorkerInfo `msgpack:"worker,omitempty"`
	// Keys of a policy.Policy. OpWorker: for a model that the broker does not know yet.
	// OpSet: the changes, of which the broker takes all or none.
	Policy map[string]string `msgpack:"policy,omitempty"`
	// OpWorker of a stage, whose Model is PIPELINE/STAGE: a Pipeline as JSON, for a
	// pipeline that the broker does not know yet.
	Pipeline string `msgpack:"pipeline,omitempty"`
	// OpTrace: the length of the recording.
	Millis int `msgpack:"millis,omitempty"`
	// OpScale: the number of processes.
	Instances int `msgpack:"instances,omitempty"`
	// OpSet, OpScale, OpAlias: keep the change when the broker starts again.
	Save bool `msgpack:"save,omitempty"`
	// OpAlias: the new models of the alias Model; none removes the alias.
	Targets []AliasTarget `msgpack:"targets,omitempty"`
	// OpClient: the client attaches again when it reads AttachAgain.
	Follows bool `msgpack:"follows,omitempty"`
	// OpClient: the client writes shm.Times while the broker records.
	Times bool `msgpack:"times,omitempty"`
	// OpClient, OpWeights: the peer can use tensors in device memory.
	Device bool `msgpack:"device,omitempty"`
	// OpWorker: the UUID of the GPU whose memory the worker offers, after the broker
	// asked for it (Reply.Needs). The descriptor follows the request: SendOffer.
	GPU string `msgpack:"gpu,omitempty"`
	// OpClient: the signature that the client needs; empty: any.
	Inputs  []string `msgpack:"inputs,omitempty"`
	Outputs []string `msgpack:"outputs,omitempty"`
	State   []string `msgpack:"state,omitempty"`
	// OpWeights.
	Weights *WeightsPeer `msgpack:"weights,omitempty"`
	// OpWatch: the last Reply.Changes that the peer has seen. OpBatches: the number of
	// batches that the peer has seen.
	Since uint64 `msgpack:"since,omitempty"`
}

// WeightsPeer is how a peer publishes or follows weights.
type WeightsPeer struct {
	Publish bool     `msgpack:"publish,omitempty"`
	Tensors []string `msgpack:"tensors,omitempty"` // of a publisher
	Again   bool     `msgpack:"again,omitempty"`   // publisher: it has published to a broker before, and may come before its workers
	Wait    bool     `msgpack:"wait,omitempty"`    // follower: answer when there is a publisher
}

// Weights is the answer to OpWeights, with the descriptor of a shm.Weights, and that of
// its device memory if there is one.
type Weights struct {
	Tensors  []string `msgpack:"tensors"`
	Follower int      `msgpack:"follower"`      // its words in the segment; -1: a publisher
	GPU      string   `msgpack:"gpu,omitempty"` // UUID of the device memory's GPU
}

// Pipeline is a model of several stages, as its workers declare it.
type Pipeline struct {
	Inputs  []string          `json:"inputs"` // as its clients write and read them
	Outputs []string          `json:"outputs"`
	Policy  map[string]string `json:"policy,omitempty"` // of all stages, and of the ring
	Stages  []PipelineStage   `json:"stages"`
}

// PipelineStage is one stage. Its inputs are inputs of the pipeline or outputs of earlier
// stages.
type PipelineStage struct {
	Name    string            `json:"name"`
	Inputs  []string          `json:"inputs"`
	Outputs []string          `json:"outputs"`
	State   []string          `json:"state,omitempty"`
	Policy  map[string]string `json:"policy,omitempty"`
}

// WorkerInfo describes a worker.
type WorkerInfo struct {
	Inputs  []string `msgpack:"inputs"` // tensors as name:dtype[dims]
	Outputs []string `msgpack:"outputs"`
	State   []string `msgpack:"state,omitempty"`
	Depth   int      `msgpack:"depth"`           // batches that it may hold
	Lanes   int      `msgpack:"lanes,omitempty"` // batches that it runs at once; 0 counts as 1
	Share   int      `msgpack:"share,omitempty"`
	Pad     string   `msgpack:"pad,omitempty"` // "", "fixed", "preferred"
	PadTo   int      `msgpack:"pad_to,omitempty"`
	GPU     string   `msgpack:"gpu,omitempty"`      // for statistics
	RunOnce bool     `msgpack:"run_once,omitempty"` // its batches must not run again
	// What it computes, a printable text. A worker joins workers of the same text; "any"
	// joins all, and all join it.
	Program string `msgpack:"program,omitempty"`
}

// Reply is the broker's answer.
type Reply struct {
	Code    uint8  `msgpack:"code"` // 0 or a status of package shm
	Message string `msgpack:"message,omitempty"`
	Version int    `msgpack:"version"`
	Pid     int    `msgpack:"pid"`
	Epoch   uint64 `msgpack:"epoch"`

	Attached *Attached `msgpack:"attached,omitempty"`
	// A worker or publisher may get Needs: there is no device memory yet. The
	// peer allocates it, which may take a while, and attaches again with its
	// descriptor on another connection.
	Needs    *DeviceNeed `msgpack:"needs,omitempty"`
	Models   []Model     `msgpack:"models,omitempty"`
	Weights  *Weights    `msgpack:"weights,omitempty"`
	Aliases  []Alias     `msgpack:"aliases,omitempty"`  // OpModels
	Stats    []byte      `msgpack:"stats,omitempty"`    // JSON, as docs/stats.md
	Draining bool        `msgpack:"draining,omitempty"` // OpModels: it takes no new requests
	Changes  uint64      `msgpack:"changes,omitempty"`  // OpModels, OpWatch: grows whenever the models change
	// More says that another frame follows with more of the lists and bytes: a reply
	// may be longer than a frame.
	More bool `msgpack:"more,omitempty"`
}

// DeviceNeed is the device memory that a ring needs.
type DeviceNeed struct {
	Bytes  int64 `msgpack:"bytes"`
	Device int   `msgpack:"device"` // number of the GPU, as the worker counts them
}

// Attached describes the segments whose descriptors come with the reply.
type Attached struct {
	Model       string            `msgpack:"model"`
	Inputs      []string          `msgpack:"inputs"`
	Outputs     []string          `msgpack:"outputs"`
	State       []string          `msgpack:"state,omitempty"`  // client of a pipeline: of all its stages
	Planes      []string          `msgpack:"planes,omitempty"` // all tensors of the ring in order, if there are others
	Slots       int               `msgpack:"slots"`
	MaxBatch    int               `msgpack:"max_batch"`          // rows of the layout
	MaxRows     int               `msgpack:"max_rows,omitempty"` // client: of one request, if less
	Geometry    uint64            `msgpack:"geometry"`
	PlanesSize  int64             `msgpack:"planes_size"`
	BoardSize   int64             `msgpack:"board_size"`
	SessionSize int64             `msgpack:"session_size"`
	DeviceSize  int64             `msgpack:"device_size,omitempty"` // of the fifth descriptor; 0: none
	GPU         string            `msgpack:"gpu,omitempty"`         // UUID of the GPU of that memory
	FirstSlot   uint32            `msgpack:"first_slot"`            // client: its window
	Window      int               `msgpack:"window"`
	FirstGen    uint32            `msgpack:"first_gen"` // client: the generation before its first request
	Times       bool              `msgpack:"times"`     // client: its session has shm.ClientTimes
	Depth       int               `msgpack:"depth"`     // worker: mails that it may hold
	WorkerID    uint32            `msgpack:"worker_id"`
	HandsOn     bool              `msgpack:"hands_on,omitempty"` // worker: another stage follows; it ends only failed requests
	Isolates    bool              `msgpack:"isolates,omitempty"` // worker: it may fail a batch as a whole
	Clock       int64             `msgpack:"clock"`              // the broker's CLOCK_MONOTONIC at its reply
	Policy      map[string]string `msgpack:"policy"`             // a policy.Policy, all keys
	Notes       []string          `msgpack:"notes,omitempty"`    // worker: differences from the policy that it asked for
}

// AttachAgain is the byte by which the broker asks a client (Request.Follows) to attach
// again, to the same name. The client then leaves the old session.
const AttachAgain = 'a'

// Alias is a name for one or more models.
type Alias struct {
	Name string        `msgpack:"name"`
	To   []AliasTarget `msgpack:"to"`
}

// AliasTarget is one model of an alias.
type AliasTarget struct {
	Model   string `msgpack:"model"`
	Share   int    `msgpack:"share"`             // hundredths of a percent
	Clients int    `msgpack:"clients,omitempty"` // clients of the alias that use this model
}

// Model is one line of OpModels.
type Model struct {
	Name    string            `msgpack:"name"`
	Inputs  []string          `msgpack:"inputs"`
	Outputs []string          `msgpack:"outputs"`
	State   []string          `msgpack:"state,omitempty"`
	Policy  map[string]string `msgpack:"policy"` // a policy.Policy, all keys
	Workers int               `msgpack:"workers"`
	Clients int               `msgpack:"clients"`
	// Workers that answer, and the reason if there are none.
	ReadyWorkers int    `msgpack:"ready_workers"`
	NotReady     string `msgpack:"not_ready,omitempty"`
	Asleep       bool   `msgpack:"asleep,omitempty"` // it has no workers, and a request starts some
	// The stages of a pipeline, in order.
	Stages []string `msgpack:"stages,omitempty"`
}
