// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"errors"
	"fmt"
	"math"
)

// Limits of a model. They keep every size computation inside an int64 and
// refuse a nonsense file before memory is asked for.
const (
	MaxLayers      = 256
	MaxWidth       = 1 << 20
	MaxWeightBytes = 64 << 30
)

// ErrConfig is wrapped by every refusal of a Config.
var ErrConfig = errors.New("bad model shape")

// Config describes a model to be made from a seed.
type Config struct {
	Sizes []int // width of the input, of each hidden layer, of the output
	Seed  int64
}

// Default is the model of the benchmark: 25.2 million weights, 96 MiB, 48 times
// the 2 MiB second-level cache of the machine it was tuned on.
func Default() Config {
	return Config{Sizes: []int{1024, 4096, 4096, 1024}, Seed: 1}
}

// Validate says what is wrong with the sizes, if anything is.
func (c Config) Validate() error {
	if len(c.Sizes) < 2 {
		return fmt.Errorf("%w: %d sizes, need an input and an output", ErrConfig, len(c.Sizes))
	}
	if len(c.Sizes)-1 > MaxLayers {
		return fmt.Errorf("%w: %d layers, at most %d", ErrConfig, len(c.Sizes)-1, MaxLayers)
	}
	for i, s := range c.Sizes {
		if s < 1 || s > MaxWidth {
			return fmt.Errorf("%w: size %d is %d, must be 1..%d", ErrConfig, i, s, MaxWidth)
		}
	}
	if b := c.WeightBytes(); b > MaxWeightBytes || b > math.MaxInt/2 {
		return fmt.Errorf("%w: %d bytes of weights, at most %d", ErrConfig, b, int64(MaxWeightBytes))
	}
	return nil
}

// WeightBytes is the size of all weights and biases. It doesn't need valid sizes
// to be safe to call, only sensible ones to mean something.
func (c Config) WeightBytes() int64 {
	var n int64
	for i := 0; i+1 < len(c.Sizes); i++ {
		n += (int64(c.Sizes[i]) + 1) * int64(c.Sizes[i+1]) * 4
	}
	return n
}

// Flops is the number of floating-point operations for one row, a fused
// multiply-add counting as two.
func (c Config) Flops() int64 {
	var n int64
	for i := 0; i+1 < len(c.Sizes); i++ {
		n += 2 * int64(c.Sizes[i]) * int64(c.Sizes[i+1])
	}
	return n
}

// Option changes how a model is run, never what it computes.
type Option func(*options)

type options struct{ kernel string }

// WithKernel forces one of Kernels() instead of the best one of this CPU.
func WithKernel(name string) Option { return func(o *options) { o.kernel = name } }

func collect(opts []Option) options {
	var o options
	for _, f := range opts {
		f(&o)
	}
	return o
}
