// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/testhooks"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
)

// Config is how a broker runs. The zero value is a broker on the default socket, for
// this user only, whose models are declared by their workers.
type Config struct {
	Socket      string        // default: $RINGBATCH_SOCKET, or broker.sock in the user's runtime folder
	AllowedUIDs []int         // users who may infer
	Grants      []Grant       // permissions of other users; this user has all
	Limits      Limits        // of one user or process
	OpenFolder  bool          // accept a socket folder that others may enter
	DrainTime   time.Duration // for accepted requests to finish; default 30 s, negative: none
	WorkerGrace time.Duration // how long a drain waits for the worker of a model without any; default 3 s
	MaxClients  int           // connections at once; default 4096
	Loops       int           // goroutines that serve the models; default: DefaultLoops
	Models      []ModelConfig
	Aliases     []alias.Alias      // names of models, which need not exist yet
	Workers     []supervise.Worker // processes to start that declare their models themselves
	GPUMemory   map[int]int64      // of each GPU, the bytes that workers may take together; a GPU that is not there has no budget
	Idle        time.Duration      // without a client, until Serve drains and returns; 0: never
	MPS         bool               // have supervised GPU workers share GPUs through MPS
	Logger      *slog.Logger       // default: slog.Default()
	// TakeOver, if not nil, has the old broker give up Socket, after this one's workers are ready.
	TakeOver func(context.Context) error
	// Save keeps a change of a declared model for the next start. instances is 0 unless
	// it changed. nil: changes cannot be saved.
	Save func(model string, settings policy.Policy, instances int) error
	// SaveAlias keeps a change of an alias; without targets, its removal.
	SaveAlias func(alias.Alias) error

	create        testhooks.Create
	firstLookTime time.Duration // see awaitFirstLook
	replaceTime   time.Duration // see awaitSuccessor
	noPeerPidfd   bool          // as before Linux 6.5, for tests
}

// ModelConfig declares a model: its tensors and its policy.
type ModelConfig struct {
	Name      string
	Signature tensor.Signature
	Policy    policy.Policy      // without a key: its default
	Workers   []supervise.Worker // processes to start for it
	Stages    []StageConfig      // of a pipeline; then clients see Signature, and all stages share Policy
	// Idle is how long without a request until Workers end. The next request starts them. 0: never.
	Idle time.Duration
	Keep bool // Workers do not end for others that need their GPU's memory
}

// Defaults. Package policy has those of a policy.
const (
	DefaultDrainTime  = 30 * time.Second
	DefaultMaxClients = 4096

	// A service manager that signals a whole group ends the workers with the broker. The
	// restarted workers must be let in.
	DefaultWorkerGrace = 3 * time.Second

	// A ring of unknown load gets DefaultSlots slots. It gets fewer if it would pass
	// DefaultRingBytes or half of the memory cgroup's room, but at least minBatches full
	// batches. The memory is taken only as clients attach.
	DefaultSlots     = 4096
	DefaultRingBytes = 1 << 30
	minBatches       = 8
)

// MaxLoops bounds Config.Loops.
const MaxLoops = 64

// DefaultLoops is one loop for every two cores, eight at most.
func DefaultLoops() int { return engine.DefaultLoops() }

func (c *Config) fill() {
	c.Socket = control.SocketPath(c.Socket)
	c.DrainTime = cmp.Or(c.DrainTime, DefaultDrainTime)
	c.WorkerGrace = cmp.Or(c.WorkerGrace, DefaultWorkerGrace)
	c.MaxClients = cmp.Or(c.MaxClients, DefaultMaxClients)
	c.Loops = cmp.Or(c.Loops, DefaultLoops())
	c.firstLookTime = cmp.Or(c.firstLookTime, defaultFirstLookTime)
	c.replaceTime = cmp.Or(c.replaceTime, defaultReplaceTime)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.create == nil {
		c.create = testhooks.SegmentsOf(c.Socket)
	}
}

// Check returns an error if a broker would refuse the model.
func (m *ModelConfig) Check() error {
	_, err := m.resolve()
	return err
}

// resolve is plan with the model's name in the error.
func (m *ModelConfig) resolve() (plan, error) {
	p, err := m.plan()
	if err != nil {
		err = fmt.Errorf("model %q: %w", m.Name, err)
	}
	return p, err
}
