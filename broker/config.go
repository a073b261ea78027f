// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/alias"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
)

// Config is how a broker runs. The zero value is a broker on the default
// socket, for this user only, whose models are declared by their workers.
type Config struct {
	Socket      string        // default: $RINGBATCH_SOCKET, or broker.sock in the runtime folder of the user
	AllowedUIDs []int         // who else may connect, and infer
	Grants      []Grant       // who else may do what; this user may do everything
	Limits      Limits        // how much of the broker one user or process may have
	OpenFolder  bool          // accept a socket folder that others may enter
	DrainTime   time.Duration // how long Serve lets accepted requests finish; default 30 s, negative: not at all
	WorkerGrace time.Duration // how long a drain waits for a worker of a model that has none; default 3 s
	MaxClients  int           // connections at once; default 4096
	Loops       int           // goroutines that serve the models, each some of them; default: see DefaultLoops
	Alone       bool          // the process does little else: loops may keep half of its Ps while they sleep for milliseconds
	Models      []ModelConfig
	Aliases     []alias.Alias      // names that stand for models; those need not be there yet
	Workers     []supervise.Worker // processes to start whose models they declare themselves
	MPS         bool               // have the GPU workers that the broker starts share GPUs through MPS
	Logger      *slog.Logger       // default: slog.Default()
	// TakeOver, if there is one, has the broker that has Socket give it up. It is
	// called when this one's workers are ready.
	TakeOver func(context.Context) error
	// Save keeps a change of a declared model for when the broker starts again.
	// instances is 0 unless that is what changed. nil: nothing can be kept.
	Save func(model string, settings policy.Policy, instances int) error
	// SaveAlias does so with an alias; without targets, that it was removed.
	SaveAlias func(alias.Alias) error
	Memory    shm.Memory // default: shm.Memfd; tests use shm.Heap

	firstLookTime time.Duration // see awaitFirstLook
	replaceTime   time.Duration // see awaitSuccessor
	noPeerPidfd   bool          // as before Linux 6.5, for tests
}

// ModelConfig declares a model: its tensors and its policy.
type ModelConfig struct {
	Name      string
	Signature tensor.Signature
	Policy    policy.Policy      // what is not set takes its default
	Workers   []supervise.Worker // processes to start for it
	Stages    []StageConfig      // of a pipeline; Signature is what its clients see, Policy what its stages have in common
}

// Defaults; those of a policy are in its table.
const (
	DefaultDrainTime  = 30 * time.Second
	DefaultMaxClients = 4096

	// A service manager that signals a whole group ends the workers with the
	// broker, and those that are started again must be let in.
	DefaultWorkerGrace = 3 * time.Second

	// A ring of unknown load gets DefaultSlots slots, fewer if they are so
	// large that it would pass DefaultRingBytes or half of what the broker's
	// memory cgroup has left, but minBatches full batches in any case. The
	// memory is taken only as clients attach.
	DefaultSlots     = 4096
	DefaultRingBytes = 1 << 30
	minBatches       = 8
)

func (c *Config) fill() {
	c.Socket = control.SocketPath(c.Socket)
	if c.DrainTime == 0 {
		c.DrainTime = DefaultDrainTime
	}
	if c.WorkerGrace == 0 {
		c.WorkerGrace = DefaultWorkerGrace
	}
	if c.MaxClients == 0 {
		c.MaxClients = DefaultMaxClients
	}
	if c.Loops == 0 {
		c.Loops = DefaultLoops()
	}
	if c.firstLookTime == 0 {
		c.firstLookTime = defaultFirstLookTime
	}
	if c.replaceTime == 0 {
		c.replaceTime = defaultReplaceTime
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Memory == nil {
		c.Memory = shm.Memfd{}
	}
}

// Resolve is the policy in force, with the slots that the model gets, and the
// memory that it will take; or why it cannot be.
func (m *ModelConfig) Resolve() (policy.Settings, *shm.Layout, error) {
	p, err := m.plan()
	if err != nil {
		err = fmt.Errorf("model %q: %w", m.Name, err)
	}
	return p.settings, p.layout, err
}
