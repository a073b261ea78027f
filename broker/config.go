package broker

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Config is how a broker runs. The zero value is a broker on the default
// socket, for this user only, whose models are declared by their workers.
type Config struct {
	Socket      string        // default: see control.SocketPath
	AllowedUIDs []int         // who else may connect; this user always may
	OpenFolder  bool          // accept a socket folder that others may enter
	DrainTime   time.Duration // how long Serve lets accepted requests finish; default 30 s, negative: not at all
	MaxClients  int           // connections at once; default 4096
	Loops       int           // goroutines that serve the models, each some of them; default: see DefaultLoops
	Models      []ModelConfig
	Workers     []supervise.Worker // processes to start whose models they declare themselves
	MPS         bool               // have the GPU workers that the broker starts share GPUs through MPS
	Logger      *slog.Logger       // default: slog.Default()
	Memory      shm.Memory         // default: shm.Memfd; tests use shm.Heap
}

// ModelConfig declares a model: its tensors, its size and its policy.
type ModelConfig struct {
	Name      string
	Signature tensor.Signature
	Slots     int // rows the ring holds; default: DefaultSlotBytes worth, within limits
	// Lease is how long a batch may run before its worker counts as hung, is
	// killed, and the batch goes to another. Default 30 s.
	Lease time.Duration
	// MaxAttempts is how many workers may die running a request before it ends
	// as WorkerDied; default 3.
	MaxAttempts int
	// Ragged has requests of different sizes share a batch: each lies in its
	// own sizes, and its workers must have asked for that.
	Ragged  bool
	Policy  batcher.Config
	Workers []supervise.Worker // processes to start for it
}

// LevelPolicy is the queue policy of one priority level.
type LevelPolicy = batcher.LevelPolicy

// Defaults of what a model leaves open.
const (
	DefaultMaxBatchSize = 32
	DefaultWaitTime     = 2 * time.Millisecond
	DefaultLease        = 30 * time.Second
	DefaultDrainTime    = 30 * time.Second
	DefaultMaxClients   = 4096

	// A ring of unknown load gets DefaultSlots slots, fewer if they are so
	// large that it would pass DefaultRingBytes or half of what the broker's
	// memory cgroup has left, but minBatches full batches in any case. The
	// memory is taken only as clients attach.
	DefaultSlots     = 4096
	DefaultRingBytes = 1 << 30
	minBatches       = 8

	DefaultMaxAttempts = 3 // the first try and two more
)

func (c *Config) fill() {
	c.Socket = control.SocketPath(c.Socket)
	if c.DrainTime == 0 {
		c.DrainTime = DefaultDrainTime
	}
	if c.MaxClients == 0 {
		c.MaxClients = DefaultMaxClients
	}
	if c.Loops == 0 {
		c.Loops = DefaultLoops()
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Memory == nil {
		c.Memory = shm.Memfd{}
	}
}

// Layout is the memory that the model will take, or why it cannot be.
func (m ModelConfig) Layout() (*shm.Layout, error) { return m.fill() }

// fill puts defaults where the declaration left something open, and computes
// the layout.
func (m *ModelConfig) fill() (*shm.Layout, error) {
	fail := func(err error) (*shm.Layout, error) { return nil, fmt.Errorf("model %q: %w", m.Name, err) }
	if !tensor.ValidName(m.Name) {
		return fail(fmt.Errorf("%w: name must be 1..%d bytes, printable, without blanks", status.ErrInvalid, tensor.MaxNameBytes))
	}
	if m.Policy.MaxBatchSize == 0 {
		m.Policy.MaxBatchSize = DefaultMaxBatchSize
	}
	if m.Policy.WaitTime == 0 {
		m.Policy.WaitTime = DefaultWaitTime
	}
	m.Policy.WaitTime = max(0, m.Policy.WaitTime) // negative asks for none
	if m.Lease == 0 {
		m.Lease = DefaultLease
	}
	if m.Lease < 0 {
		return fail(fmt.Errorf("%w: lease is %v, must be positive", status.ErrInvalid, m.Lease))
	}
	if m.MaxAttempts == 0 {
		m.MaxAttempts = DefaultMaxAttempts
	}
	if m.MaxAttempts < 1 {
		return fail(fmt.Errorf("%w: max_attempts is %d, must be at least 1", status.ErrInvalid, m.MaxAttempts))
	}
	if err := m.Signature.Validate(); err != nil {
		return fail(err)
	}
	if m.Ragged && len(m.Policy.Buckets) > 0 {
		return fail(fmt.Errorf("%w: a ragged model has no buckets: each request lies in its own sizes", status.ErrInvalid))
	}
	if n := tensor.VariableDims(m.Signature.Inputs); len(m.Policy.Buckets) > n {
		return fail(fmt.Errorf("%w: buckets for %d variable dimensions, the inputs have %d", status.ErrInvalid, len(m.Policy.Buckets), n))
	}
	if err := checkBuckets(&m.Signature, m.Policy.Buckets); err != nil {
		return fail(err)
	}
	if m.Slots == 0 {
		l, err := shm.NewLayout(m.Signature, 1, m.Policy.MaxBatchSize)
		if err != nil {
			return fail(err)
		}
		m.Slots = int(min(DefaultSlots, defaultRingBytes()/max(1, l.SlotBytes())))
		m.Slots = min(max(m.Slots, minBatches*m.Policy.MaxBatchSize), shm.MaxSlots)
	}
	for i := range m.Workers {
		if err := m.Workers[i].Fill(); err != nil {
			return fail(err)
		}
	}
	if m.Slots < m.Policy.MaxBatchSize {
		return fail(fmt.Errorf("%w: %d slots cannot hold a batch of %d", status.ErrInvalid, m.Slots, m.Policy.MaxBatchSize))
	}
	l, err := shm.NewLayout(m.Signature, m.Slots, m.Policy.MaxBatchSize)
	if err != nil {
		return fail(err)
	}
	return l, nil
}

func checkBuckets(sig *tensor.Signature, buckets [][]uint32) error {
	n := 0
	for _, t := range sig.Inputs {
		for _, v := range t.Variable {
			if n >= len(buckets) {
				return nil
			}
			last := uint32(0)
			for _, size := range buckets[n] {
				if size <= last || int64(size) > int64(t.Shape[v]) {
					return fmt.Errorf("%w: buckets of %q dimension %d must ascend and end at most at %d", status.ErrInvalid, t.Name, v, t.Shape[v])
				}
				last = size
			}
			if len(buckets[n]) > 0 && int64(last) != int64(t.Shape[v]) {
				return fmt.Errorf("%w: the last bucket of %q dimension %d must be its maximum, %d", status.ErrInvalid, t.Name, v, t.Shape[v])
			}
			n++
		}
	}
	return nil
}

// policyMessage is the policy as it travels.
func (m *ModelConfig) policyMessage() control.Policy {
	p := control.Policy{
		MaxBatchSize: m.Policy.MaxBatchSize, WaitTime: int64(m.Policy.WaitTime), Slots: m.Slots, Lease: int64(m.Lease),
		Preferred: m.Policy.PreferredSizes, DefaultLevel: m.Policy.DefaultLevel, Ageing: int64(m.Policy.Ageing),
		Buckets: m.Policy.Buckets, PreserveOrder: m.Policy.PreserveOrder, Ragged: m.Ragged, MaxAttempts: m.MaxAttempts,
	}
	for _, l := range m.Policy.Levels {
		p.Levels = append(p.Levels, control.Level{
			MaxQueue: l.MaxQueue, DefaultTimeout: int64(l.DefaultTimeout), MaxTimeout: int64(l.MaxTimeout), Delay: l.OnTimeout == batcher.Delay,
		})
	}
	return p
}

// fromPolicy is the way back, for a model that its first worker declares.
func fromPolicy(p *control.Policy) (slots int, lease time.Duration, cfg batcher.Config) {
	if p == nil {
		return 0, 0, cfg
	}
	cfg = batcher.Config{
		MaxBatchSize: p.MaxBatchSize, WaitTime: time.Duration(p.WaitTime), PreferredSizes: p.Preferred,
		DefaultLevel: p.DefaultLevel, Ageing: time.Duration(p.Ageing), Buckets: p.Buckets, PreserveOrder: p.PreserveOrder,
	}
	for _, l := range p.Levels {
		lp := batcher.LevelPolicy{MaxQueue: l.MaxQueue, DefaultTimeout: time.Duration(l.DefaultTimeout), MaxTimeout: time.Duration(l.MaxTimeout)}
		if l.Delay {
			lp.OnTimeout = batcher.Delay
		}
		cfg.Levels = append(cfg.Levels, lp)
	}
	return p.Slots, time.Duration(p.Lease), cfg
}
