// SPDX-License-Identifier: Apache-2.0

package onnx

import (
	"context"
	"errors"

	"github.com/ringbatch/ringbatch/worker"
)

// Config describes the model and how to serve it.
type Config struct {
	File string // the ONNX file; the first dimension of each input is the batch

	// Library is the path of libonnxruntime; default $ONNXRUNTIME_LIBRARY, or the system's
	// library. A process loads it once.
	Library string

	// Dims are the sizes of dimensions, besides the batch, that the graph leaves open, by
	// input and place: {"tokens.0": 128}.
	Dims map[string]int

	// Outputs are the names of the outputs to serve, in this order; default: all.
	Outputs []string

	Threads int  // of one operation; 0 is one per core
	NoSpin  bool // threads sleep between operations: where other processes need the cores

	// NoCheck also serves a model whose rows have other results in a batch than alone.
	// Tolerance is the allowed difference, as a part of the largest number; default
	// 0.001, or 0.02 with half precision outputs.
	NoCheck   bool
	Tolerance float64

	// Worker configures the attachment. Serve sets Signature, and Concurrency to 1.
	Worker worker.Config

	// Ready, if not nil, is called with the worker's configuration before it attaches.
	Ready func(worker.Config)
}

// ErrModel matches all errors about the file, its graph, and Dims.
var ErrModel = errors.New("the model cannot be served")

// Serve loads the file, checks that its rows may be batched, warms it up, and serves it
// until ctx ends, as worker.Serve does.
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
