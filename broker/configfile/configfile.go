// Package configfile reads the broker's configuration file (TOML).
package configfile

import (
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"github.com/BurntSushi/toml"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// The configuration file, see docs/configuration.md:
//
//	socket = "/run/ringbatch/broker.sock"
//
//	[[model]]
//	name = "resnet50"
//	inputs = ["x:f32[3,224,224]"]
//	outputs = ["y:f32[1000]"]
//	max_batch_size = 32
//	wait_time = "5ms"
//
//	[[model.worker]]
//	command = ["ringbatch", "torch", "resnet50.jit"]
//	instances = 3
//	gpus = [0]
type file struct {
	Socket     string        `toml:"socket"`
	AllowUIDs  []int         `toml:"allow_uids"`
	OpenFolder bool          `toml:"open_folder"`
	DrainTime  *fileDuration `toml:"drain_time"`
	MaxClients fileCount     `toml:"max_clients"`
	MPS        bool          `toml:"mps"`
	Models     []fileModel   `toml:"model"`
	Workers    []fileWorker  `toml:"worker"`
}

type fileWorker struct {
	Command          []string          `toml:"command"`
	Instances        fileCount         `toml:"instances"`
	GPUs             []int             `toml:"gpus"`
	Env              map[string]string `toml:"env"`
	ThreadPercentage fileCount         `toml:"thread_percentage"`
	StopTime         *fileDuration     `toml:"stop_time"`
}

func (f *fileWorker) worker() (supervise.Worker, error) {
	w := supervise.Worker{
		Command: f.Command, Instances: int(f.Instances), GPUs: f.GPUs, Env: f.Env,
		ThreadPercentage: int(f.ThreadPercentage), StopTime: f.StopTime.value(),
	}
	if f.StopTime != nil && w.StopTime == 0 {
		return w, fmt.Errorf("%w: stop_time is 0, must be positive", status.ErrInvalid)
	}
	return w, w.Fill()
}

type fileModel struct {
	Name          string              `toml:"name"`
	Inputs        []string            `toml:"inputs"`
	Outputs       []string            `toml:"outputs"`
	Slots         fileCount           `toml:"slots"`
	MaxBatchSize  fileCount           `toml:"max_batch_size"`
	WaitTime      *fileDuration       `toml:"wait_time"`
	Lease         *fileDuration       `toml:"lease"`
	Preferred     []int               `toml:"preferred_batch_sizes"`
	Ageing        *fileDuration       `toml:"ageing"`
	DefaultLevel  int                 `toml:"default_priority"`
	Levels        []fileLevel         `toml:"priority"`
	Buckets       map[string][]uint32 `toml:"buckets"`
	PreserveOrder bool                `toml:"preserve_order"`
	MaxAttempts   fileCount           `toml:"max_attempts"`
	Ragged        bool                `toml:"ragged"`
	Workers       []fileWorker        `toml:"worker"`
}

type fileLevel struct {
	MaxQueue       int           `toml:"max_queue"`
	DefaultTimeout *fileDuration `toml:"default_timeout"`
	MaxTimeout     *fileDuration `toml:"max_timeout"`
	OnTimeout      string        `toml:"on_timeout"`
}

// fileDuration is written "5ms" or as a number of seconds.
type fileDuration time.Duration

func (d *fileDuration) UnmarshalTOML(v any) error {
	t, err := broker.ParseDuration(fmt.Sprint(v))
	*d = fileDuration(t)
	return err
}

func (d *fileDuration) value() time.Duration {
	if d == nil {
		return 0
	}
	return time.Duration(*d)
}

// fileCount is at least 1 where it is written down: 0 would pass as "default".
type fileCount int

func (c *fileCount) UnmarshalTOML(v any) error {
	n, ok := v.(int64)
	if !ok || n < 1 || n > math.MaxInt32 {
		return fmt.Errorf("%v is not a number of 1 or more", v)
	}
	*c = fileCount(n)
	return nil
}

// Load reads a configuration file. Unknown keys are errors: a misspelt
// wait_time must not pass as "default".
func Load(path string) (broker.Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return broker.Config{}, fmt.Errorf("configuration: %w", err)
	}
	cfg, err := Parse(string(text))
	if err != nil {
		return broker.Config{}, fmt.Errorf("configuration %s: %w", path, err)
	}
	return cfg, nil
}

// Parse reads the text of a configuration file.
func Parse(text string) (broker.Config, error) {
	var f file
	meta, err := toml.Decode(text, &f)
	if err != nil {
		return broker.Config{}, fmt.Errorf("%w: %v", status.ErrInvalid, err)
	}
	if unknown := meta.Undecoded(); len(unknown) > 0 {
		return broker.Config{}, fmt.Errorf("%w: unknown key %q", status.ErrInvalid, unknown[0].String())
	}
	cfg := broker.Config{Socket: f.Socket, AllowedUIDs: f.AllowUIDs, OpenFolder: f.OpenFolder, DrainTime: f.DrainTime.value(), MaxClients: int(f.MaxClients), MPS: f.MPS}
	if f.DrainTime != nil && cfg.DrainTime == 0 {
		cfg.DrainTime = -1 // asked for, not left open
	}
	for i := range f.Models {
		m, err := f.Models[i].model()
		if err != nil {
			return broker.Config{}, fmt.Errorf("model %q: %w", f.Models[i].Name, err)
		}
		cfg.Models = append(cfg.Models, m)
	}
	for i := range f.Workers {
		w, err := f.Workers[i].worker()
		if err != nil {
			return broker.Config{}, err
		}
		cfg.Workers = append(cfg.Workers, w)
	}
	return cfg, nil
}

func (f *fileModel) model() (broker.ModelConfig, error) {
	sig, err := tensor.ParseSignature(f.Inputs, f.Outputs)
	if err != nil {
		return broker.ModelConfig{}, err
	}
	m := broker.ModelConfig{Name: f.Name, Signature: sig, Slots: int(f.Slots), Lease: f.Lease.value(), MaxAttempts: int(f.MaxAttempts), Ragged: f.Ragged, Policy: batcher.Config{
		MaxBatchSize: int(f.MaxBatchSize), WaitTime: f.WaitTime.value(), PreferredSizes: f.Preferred, DefaultLevel: f.DefaultLevel,
		Ageing: f.Ageing.value(), PreserveOrder: f.PreserveOrder,
	}}
	if f.WaitTime != nil && m.Policy.WaitTime == 0 {
		m.Policy.WaitTime = -1 // asked for, not left open
	}
	if f.Lease != nil && m.Lease == 0 {
		return m, fmt.Errorf("%w: lease is 0, must be positive", status.ErrInvalid)
	}
	for _, l := range f.Levels {
		lp := batcher.LevelPolicy{MaxQueue: l.MaxQueue, DefaultTimeout: l.DefaultTimeout.value(), MaxTimeout: l.MaxTimeout.value()}
		if l.OnTimeout != "" {
			if lp.OnTimeout, err = broker.ParseAction(l.OnTimeout); err != nil {
				return m, fmt.Errorf("%w: on_timeout %q: %v", status.ErrInvalid, l.OnTimeout, err)
			}
		}
		m.Policy.Levels = append(m.Policy.Levels, lp)
	}
	for i := range f.Workers {
		w, err := f.Workers[i].worker()
		if err != nil {
			return m, err
		}
		m.Workers = append(m.Workers, w)
	}
	m.Policy.Buckets, err = placeBuckets(&sig, f.Buckets)
	return m, err
}

// placeBuckets puts buckets named "tensor.dimension" into signature order.
func placeBuckets(sig *tensor.Signature, named map[string][]uint32) ([][]uint32, error) {
	if len(named) == 0 {
		return nil, nil
	}
	var placed [][]uint32
	var known []string
	found := 0
	for _, t := range sig.Inputs {
		for _, v := range t.Variable {
			key := fmt.Sprintf("%s.%d", t.Name, v)
			known = append(known, key)
			sizes, ok := named[key]
			if ok {
				found++
			}
			placed = append(placed, sizes)
		}
	}
	if found != len(named) {
		return nil, fmt.Errorf("%w: buckets are declared for variable input dimensions only, which are %s", status.ErrInvalid, strings.Join(known, ", "))
	}
	return placed, nil
}
