// SPDX-License-Identifier: Apache-2.0

// Package control is the control plane: msgpack messages in length-prefixed
// frames over a Unix socket, with descriptors by SCM_RIGHTS. It is never on
// the path of a request.
//
// A peer sends one Request and gets one Reply. The connection of an attached
// client or worker stays open: its end is the peer's end.
package control

import (
	"fmt"
	"time"
)

// Version of the messages. A peer of another version is refused.
const Version = 4

// VersionAdvice says what to do about two sides that speak different versions.
func VersionAdvice(one string, version int, other string, otherVersion int) string {
	older := one
	if otherVersion < version {
		older = other
	}
	return fmt.Sprintf("%s speaks control version %d, %s %d; bring %s up to date", one, version, other, otherVersion, older)
}

// WatchTime is how long the broker leaves OpWatch without an answer: the peer
// then learns that the broker is still there, and asks again.
const WatchTime = 30 * time.Second

// ChangeTime is how long the broker may take to change processes: each new one
// has to load its model.
const ChangeTime = time.Hour

// Op says what a Request asks for.
type Op string

const (
	OpClient  Op = "client"  // attach as a client of a model; descriptors: planes, board (read-only), session, doorbell; device memory
	OpWorker  Op = "worker"  // attach as a worker of a model, declaring it if need be; descriptors: planes, board, session, doorbell; device memory
	OpModels  Op = "models"  // list the models
	OpStats   Op = "stats"   // everything the broker counts
	OpSet     Op = "set"     // change a model's policy
	OpBatches Op = "batches" // the last batches of a model, as JSON in Reply.Stats
	OpTrace   Op = "trace"   // record a model for Millis, as JSON in Reply.Stats
	OpPing    Op = "ping"    // is anybody there
	OpWatch   Op = "watch"   // wait until the models change

	// These answer when they are done, within ChangeTime.
	OpRestart Op = "restart" // replace a model's worker processes, one by one
	OpScale   Op = "scale"   // run another number of them

	OpAlias    Op = "alias"    // have a name stand for other models, or for none
	OpHandOver Op = "handover" // let another broker have the socket, and drain once it has
)

// Request is what a peer sends.
type Request struct {
	Version int    `msgpack:"version"`
	Op      Op     `msgpack:"op"`
	Model   string `msgpack:"model,omitempty"`
	Name    string `msgpack:"name,omitempty"`   // the peer's own name for itself, for logs and stats
	Window  int    `msgpack:"window,omitempty"` // OpClient: slots wanted
	// OpWorker: what it serves.
	Worker *WorkerInfo `msgpack:"worker,omitempty"`
	// A policy.Policy, the keys asked for. OpWorker: to declare the model with
	// if the broker does not know it yet. OpSet: what to change, whole or not
	// at all.
	Policy map[string]string `msgpack:"policy,omitempty"`
	// OpWorker of a stage, whose Model is PIPELINE/STAGE: a Pipeline as JSON, to
	// declare it with if the broker does not know it yet. Empty: it does.
	Pipeline string `msgpack:"pipeline,omitempty"`
	// OpTrace: for how long.
	Millis int `msgpack:"millis,omitempty"`
	// OpScale: how many processes.
	Instances int `msgpack:"instances,omitempty"`
	// OpSet, OpScale, OpAlias: also keep it for when the broker starts again.
	Save bool `msgpack:"save,omitempty"`
	// OpAlias: what Model stands for from now on; none: it is no alias any more.
	Targets []AliasTarget `msgpack:"targets,omitempty"`
	// OpClient: it attaches again when it reads AttachAgain.
	Follows bool `msgpack:"follows,omitempty"`
	// OpClient: it tells the times of its requests while they are recorded.
	Times bool `msgpack:"times,omitempty"`
	// OpClient: it can use tensors in device memory.
	Device bool `msgpack:"device,omitempty"`
	// OpWorker: the UUID of the GPU whose memory the worker offers, since it was asked
	// for some (Reply.Needs). Its descriptor follows the request: SendOffer.
	GPU string `msgpack:"gpu,omitempty"`
	// OpClient: the signature that it was attached to before, as tensors; it will
	// not have another one. Empty: it takes any.
	Inputs  []string `msgpack:"inputs,omitempty"`
	Outputs []string `msgpack:"outputs,omitempty"`
	// OpWatch: the value of Reply.Changes that the peer knows. OpBatches: how many
	// batches it knows of.
	Since uint64 `msgpack:"since,omitempty"`
}

// Pipeline is a model of several stages, as its workers declare it.
type Pipeline struct {
	Inputs  []string          `json:"inputs"` // what its clients write, and read
	Outputs []string          `json:"outputs"`
	Policy  map[string]string `json:"policy,omitempty"` // of all stages, and of the ring
	Stages  []PipelineStage   `json:"stages"`
}

// PipelineStage is one of them. Its inputs are inputs of the pipeline or
// outputs of stages before it.
type PipelineStage struct {
	Name    string            `json:"name"`
	Inputs  []string          `json:"inputs"`
	Outputs []string          `json:"outputs"`
	Policy  map[string]string `json:"policy,omitempty"`
}

// WorkerInfo is what a worker tells about itself.
type WorkerInfo struct {
	Inputs  []string `msgpack:"inputs"` // tensors as name:dtype[dims]
	Outputs []string `msgpack:"outputs"`
	Depth   int      `msgpack:"depth"`           // batches it may hold
	Lanes   int      `msgpack:"lanes,omitempty"` // batches it runs at once; 0 counts as 1
	Weight  int      `msgpack:"weight,omitempty"`
	Pad     string   `msgpack:"pad,omitempty"` // "", "fixed", "preferred"
	PadTo   int      `msgpack:"pad_to,omitempty"`
	GPU     string   `msgpack:"gpu,omitempty"` // where it computes, for stats
}

// Reply is the broker's answer.
type Reply struct {
	Code    uint8  `msgpack:"code"` // 0 or a status of package shm
	Message string `msgpack:"message,omitempty"`
	Version int    `msgpack:"version"`
	Pid     int    `msgpack:"pid"`
	Epoch   uint64 `msgpack:"epoch"`

	Attached *Attached `msgpack:"attached,omitempty"`
	// Needs comes to a worker instead of Attached: the ring has no device memory
	// yet. It allocates some, which may take a while, and attaches again with its
	// descriptor, on another connection.
	Needs    *DeviceNeed `msgpack:"needs,omitempty"`
	Models   []Model     `msgpack:"models,omitempty"`
	Aliases  []Alias     `msgpack:"aliases,omitempty"`  // OpModels
	Stats    []byte      `msgpack:"stats,omitempty"`    // JSON, as docs/stats.md
	Draining bool        `msgpack:"draining,omitempty"` // OpModels: it takes no new requests
	Changes  uint64      `msgpack:"changes,omitempty"`  // OpModels, OpWatch: grows whenever the models change
	// More says that the next frame goes on with the lists and bytes of this
	// one: no reply is too long for a frame.
	More bool `msgpack:"more,omitempty"`
}

// DeviceNeed is device memory that a ring is to have.
type DeviceNeed struct {
	Bytes  int64 `msgpack:"bytes"`
	Device int   `msgpack:"device"` // number of the GPU, as the worker counts them
}

// Attached describes the segments whose descriptors come with the reply.
type Attached struct {
	Model       string            `msgpack:"model"`
	Inputs      []string          `msgpack:"inputs"`
	Outputs     []string          `msgpack:"outputs"`
	Planes      []string          `msgpack:"planes,omitempty"` // all tensors of the ring, in order, where these are not just the inputs and outputs
	Slots       int               `msgpack:"slots"`
	MaxBatch    int               `msgpack:"max_batch"`          // rows the segments were laid out for
	MaxRows     int               `msgpack:"max_rows,omitempty"` // client: of one request, where that is less
	Geometry    uint64            `msgpack:"geometry"`
	PlanesSize  int64             `msgpack:"planes_size"`
	BoardSize   int64             `msgpack:"board_size"`
	SessionSize int64             `msgpack:"session_size"`
	DeviceSize  int64             `msgpack:"device_size,omitempty"` // of the device memory, the fifth descriptor; 0: there is none for this peer
	GPU         string            `msgpack:"gpu,omitempty"`         // UUID of the GPU that it is on
	FirstSlot   uint32            `msgpack:"first_slot"`            // client: its window
	Window      int               `msgpack:"window"`
	FirstGen    uint32            `msgpack:"first_gen"` // client: the generation before its first
	Times       bool              `msgpack:"times"`     // client: its session has room for its times
	Depth       int               `msgpack:"depth"`     // worker: mails it may hold
	WorkerID    uint32            `msgpack:"worker_id"`
	HandsOn     bool              `msgpack:"hands_on,omitempty"` // worker: another stage follows, so it ends only the requests that fail
	Clock       int64             `msgpack:"clock"`              // the broker's CLOCK_MONOTONIC when it replied: the peer's must be the same clock
	Policy      map[string]string `msgpack:"policy"`             // a policy.Policy, all keys
	Notes       []string          `msgpack:"notes,omitempty"`    // worker: how the policy differs from what it asked for
}

// AttachAgain is the byte that the broker sends a client that follows: it should
// attach again, to the same name, while its session goes on, and then leave it.
const AttachAgain = 'a'

// Alias is a name that stands for models.
type Alias struct {
	Name string        `msgpack:"name"`
	To   []AliasTarget `msgpack:"to"`
}

// AliasTarget is one of them.
type AliasTarget struct {
	Model   string `msgpack:"model"`
	Share   int    `msgpack:"share"`             // hundredths of a percent
	Clients int    `msgpack:"clients,omitempty"` // that attached to the alias and have this model
}

// Model is one line of OpModels.
type Model struct {
	Name    string            `msgpack:"name"`
	Inputs  []string          `msgpack:"inputs"`
	Outputs []string          `msgpack:"outputs"`
	Policy  map[string]string `msgpack:"policy"` // a policy.Policy, all keys
	Workers int               `msgpack:"workers"`
	Clients int               `msgpack:"clients"`
	// Workers that can be counted on; and why there are none.
	ReadyWorkers int    `msgpack:"ready_workers"`
	NotReady     string `msgpack:"not_ready,omitempty"`
	// Of a pipeline: its stages, in order.
	Stages []string `msgpack:"stages,omitempty"`
}
