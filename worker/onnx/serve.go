// SPDX-License-Identifier: Apache-2.0

package onnx

import (
	"context"
	"errors"

	"github.com/ringbatch/ringbatch/worker"
)

// Config says what is served, and how.
type Config struct {
	File string // the ONNX file; the first dimension of each input is the batch

	// Library is libonnxruntime's path; default $ONNXRUNTIME_LIBRARY, or what
	// the system's linker finds. One process loads one.
	Library string

	// Dims are the sizes of dimensions that the graph leaves open besides the
	// batch, by their place in a row: {"tokens.0": 128}.
	Dims map[string]int

	Threads int  // of one operation; 0 is one per core
	NoSpin  bool // threads sleep between operations: where other processes need the cores

	// NoCheck serves also a model whose rows give other results in a batch
	// than alone. Tolerance is how far they may differ, as a part of the
	// largest number; default 0.001, or 0.02 with half precision outputs.
	NoCheck   bool
	Tolerance float64

	// Worker is how it attaches. Its signature is the graph's; Concurrency is 1.
	Worker worker.Config

	// Ready, if not nil, is told the worker's configuration before it attaches.
	Ready func(worker.Config)
}

// ErrModel is what is wrong with a file, its graph or what was said about it.
var ErrModel = errors.New("the model cannot be served")

// Serve loads the file, makes sure that its rows may be batched, warms it up and
// serves it until ctx ends, as worker.Serve does.
func Serve(ctx context.Context, cfg Config) error {
	if err := loadLibrary(cfg.Library); err != nil {
		return err
	}
	m, err := open(&cfg)
	if err != nil {
		return err
	}
	defer m.close()
	settings, err := cfg.Worker.Policy.Resolve(m.signature.Inputs)
	if err != nil {
		return err
	}
	if settings.MaxBatchSize > 1 && !cfg.NoCheck {
		if err := m.check(cfg.Tolerance); err != nil {
			return err
		}
	}
	if err := m.warmUp(ctx, settings.MaxBatchSize); err != nil {
		return err
	}
	w := cfg.Worker
	w.Signature, w.Concurrency = m.signature, 1
	lane, err := newLane(m)
	if err != nil {
		return err
	}
	defer lane.close()
	if cfg.Ready != nil {
		cfg.Ready(w)
	}
	return worker.Serve(ctx, w, lane.run)
}
