// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/load"
)

// config is the flags of a benchmark.
type config struct {
	load.Config
	Bound bool `json:"-"`
}

// Limits of the flags.
const (
	maxModels    = 256
	maxInFlight  = 1 << 16
	minWindow    = 100 * time.Millisecond
	maxWaitTime  = time.Minute
	maxPerSecond = 1e7
)

func (c *config) bind(f *pflag.FlagSet) {
	f.IntVar(&c.WorkerNum, "worker_num", 8, "producer processes")
	f.IntVar(&c.WorkerBatch, "worker_batch", 1, "rows per request")
	f.IntVar(&c.MaxBatchSize, "max_batch_size", 32, "most rows of a batch")
	f.IntVar(&c.ModelNum, "model_num", 1, "model worker processes")
	c.WaitTime = load.Seconds(5 * time.Millisecond)
	f.Var(waitTime{&c.WaitTime}, "wait_time",
		"how long the oldest request waits for others to batch with: seconds as a number, like 10ms, or auto")
	f.BoolVar(&c.NoDynamicBatch, "no_dynamic_batch", false, "every producer runs the model by itself: the baseline")
	f.StringVar(&c.ModelType, "model_type", "mlp", "the model: "+kindNames())
	f.StringVar(&c.ModelPath, "model_path", "", "torch: a file, or an import path, module:name")
	f.StringVar(&c.DataType, "data_type", "f32", "element type of the input")
	f.IntSliceVar(&c.InputShape, "input_shape", []int{16}, "echo, affine, simulated, torch: shape of a row")
	c.Duration = load.Seconds(2 * time.Second)
	f.Var(&c.Duration, "duration", "length of one measuring window; windows repeat until the last three agree")
	c.Warmup = load.Seconds(time.Second)
	f.Var(&c.Warmup, "warmup", "time before the first window")
	f.IntVar(&c.InFlight, "in_flight", 0, "requests that each producer has in flight (default 1; 64 with --rate)")
	f.Float64Var(&c.Rate, "rate", 0, "open loop: requests per second of all producers together, Poisson arrivals (default: closed loop)")
	f.BoolVar(&c.Bound, "bound", true, "also measure the upper bound: the model processes feeding themselves full batches")
	f.Float64Var(&c.Stability, "stability", 10, "the last three windows must agree within this percentage")
	f.IntVar(&c.MaxWindows, "max_windows", 10, "stop waiting for stability after this many windows")
	f.Int64Var(&c.Seed, "seed", 1, "of weights, inputs and arrival times")
	c.SimulatedFixed, c.SimulatedItem = load.Seconds(3*time.Millisecond), load.Seconds(100*time.Microsecond)
	f.Var(&c.SimulatedFixed, "simulated_fixed", "simulated: cost of a batch")
	f.Var(&c.SimulatedItem, "simulated_item", "simulated: cost of each row")
}

// fill resolves defaults that depend on other flags.
func (c *config) fill() {
	if c.InFlight == 0 {
		c.InFlight = 1
		if c.Rate > 0 {
			c.InFlight = 64
		}
	}
	if !slices.Contains([]string{"echo", "affine", "simulated", "torch"}, c.ModelType) {
		c.InputShape = nil
	}
	if c.ModelType != "simulated" {
		c.SimulatedFixed, c.SimulatedItem = 0, 0
	}
	if d, err := tensor.ParseDType(c.DataType); err == nil {
		c.DataType = d.String() // NumPy's names become ours
	}
}

// validate refuses impossible flags, with the reason and the limit.
func (c *config) validate() error {
	kind, ok := modelKinds()[c.ModelType]
	if !ok {
		return fmt.Errorf("--model_type: no model %q; there are %s", c.ModelType, kindNames())
	}
	for _, r := range []struct {
		flag      string
		got       int
		low, high int
	}{
		{"worker_num", c.WorkerNum, 1, broker.DefaultMaxClients},
		{"max_batch_size", c.MaxBatchSize, 1, shm.MaxBatchRows},
		{"model_num", c.ModelNum, 1, maxModels},
		{"in_flight", c.InFlight, 1, maxInFlight},
		{"max_windows", c.MaxWindows, load.MinWindows, 1000},
	} {
		if r.got < r.low || r.got > r.high {
			return fmt.Errorf("--%s is %d, must be %d..%d", r.flag, r.got, r.low, r.high)
		}
	}
	switch {
	case c.WorkerBatch < 1 || c.WorkerBatch > c.MaxBatchSize:
		return fmt.Errorf("--worker_batch is %d, must be 1..%d: a request cannot have more rows than --max_batch_size", c.WorkerBatch,
			c.MaxBatchSize)
	case c.WaitTime.D() != policy.Auto && c.WaitTime < 0 || c.WaitTime.D() > maxWaitTime:
		return fmt.Errorf("--wait_time is %v, must be 0..%v", c.WaitTime, maxWaitTime)
	case c.Duration.D() < minWindow:
		return fmt.Errorf("--duration is %v, must be at least %v", c.Duration, minWindow)
	case c.Warmup < 0:
		return fmt.Errorf("--warmup is %v, must not be negative", c.Warmup)
	case !(c.Rate >= 0 && c.Rate <= maxPerSecond):
		return fmt.Errorf("--rate is %v, must be 0..%v requests per second", c.Rate, maxPerSecond)
	case c.Rate > 0 && c.NoDynamicBatch:
		return errors.New("--rate needs the broker: it cannot go with --no_dynamic_batch")
	case !(c.Stability > 0 && c.Stability <= 100):
		return fmt.Errorf("--stability is %v, must be above 0 and at most 100 percent", c.Stability)
	case !slices.Contains(kind.dtypes, c.DataType):
		return fmt.Errorf("--data_type: %s takes %s, got %q", c.ModelType, strings.Join(kind.dtypes, ", "), c.DataType)
	case c.ModelPath != "" && !kind.takesPath:
		return fmt.Errorf("--model_path: %s has no model file", c.ModelType)
	}
	if c.ModelPath != "" && !(c.ModelType == "torch" && isImportPath(c.ModelPath)) {
		if st, err := os.Stat(c.ModelPath); err != nil {
			return fmt.Errorf("--model_path: %w", err)
		} else if !st.Mode().IsRegular() {
			return fmt.Errorf("--model_path: %s is not a file", c.ModelPath)
		}
	}
	if c.slots() > shm.MaxSlots {
		return fmt.Errorf("--worker_num × --in_flight × --worker_batch is %d slots, must be at most %d", c.slots(), shm.MaxSlots)
	}
	return kind.check(c.model())
}

// slots is the size of the ring: every producer's window, and at least two batches.
func (c *config) slots() int {
	return max(c.WorkerNum*c.window(), 2*c.window(), 2*c.MaxBatchSize) // one client may not have all of them
}

// window is the slots of one producer.
func (c *config) window() int { return c.producer().Window() }

// producer is the job of all producers.
func (c *config) producer() load.Job {
	return load.Job{Model: modelName, Rows: c.WorkerBatch, InFlight: c.InFlight}
}

func (c *config) model() modelJob {
	return modelJob{Type: c.ModelType, Path: c.ModelPath, DType: c.DataType, Shape: c.InputShape, Seed: c.Seed,
		Fixed: c.SimulatedFixed.D(), Item: c.SimulatedItem.D()}
}

// note is the remark about the model in every output.
func (c *config) note() string {
	if k := modelKinds()[c.ModelType]; k.note != nil {
		return k.note(c.model())
	}
	return ""
}

// waitTime is the value of --wait_time: seconds, or auto.
type waitTime struct{ *load.Seconds }

func (w waitTime) Set(text string) error {
	if text == "auto" {
		*w.Seconds = load.Seconds(policy.Auto)
		return nil
	}
	return w.Seconds.Set(text)
}
