// SPDX-License-Identifier: Apache-2.0

package onnx

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	ort "github.com/yalue/onnxruntime_go"

	"github.com/ringbatch/ringbatch/internal/trust"
	"github.com/ringbatch/ringbatch/tensor"
)

// model is a session with the signature of its graph.
type model struct {
	session         *ort.DynamicAdvancedSession
	inputs, outputs []node
	signature       tensor.Signature
}

var loading sync.Mutex

// loadLibrary loads ONNX Runtime, once per process.
func loadLibrary(path string) error {
	loading.Lock()
	defer loading.Unlock()
	if ort.IsInitialized() {
		return nil
	}
	if path == "" {
		path = os.Getenv("ONNXRUNTIME_LIBRARY")
	}
	if path == "" {
		path = "libonnxruntime.so"
	}
	ort.SetSharedLibraryPath(path)
	if err := ort.InitializeEnvironment(ort.WithLogLevelError()); err != nil {
		return fmt.Errorf("no ONNX Runtime: %s. It is in the releases of ONNX Runtime and in its Python wheel "+
			"(onnxruntime/capi/libonnxruntime.so.*); say where with --library or ONNXRUNTIME_LIBRARY", firstLine(err))
	}
	return nil
}

// open loads the file and finds its signature. It runs the model once to find the shapes
// of the outputs, which graphs often leave open.
func open(cfg *Config) (*model, error) {
	f, err := trust.Open(cfg.File)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrModel, err)
	}
	f.Close() // ONNX Runtime opens it by name, since other files may have the weights
	ins, outs, err := ort.GetInputOutputInfo(cfg.File)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %s", ErrModel, cfg.File, firstLine(err))
	}
	m := &model{}
	if m.inputs, err = inputNodes(ins, cfg.Dims); err != nil {
		return nil, err
	}
	if outs, err = pick(outs, cfg.Outputs); err != nil {
		return nil, err
	}
	for _, info := range outs {
		n, err := newNode("output", info)
		if err != nil {
			return nil, err
		}
		if len(info.Dimensions) == 0 {
			return nil, fmt.Errorf("%w: output %q has no dimensions: its first dimension is not the batch", ErrModel, n.name)
		}
		m.outputs = append(m.outputs, n)
	}
	options, err := sessionOptions(cfg)
	if err != nil {
		return nil, err
	}
	defer options.Destroy()
	if m.session, err = ort.NewDynamicAdvancedSession(cfg.File, names(m.inputs), names(m.outputs), options); err != nil {
		return nil, fmt.Errorf("%w: %s: %s", ErrModel, cfg.File, firstLine(err))
	}
	if err := m.findOutputs(); err != nil {
		m.close()
		return nil, err
	}
	m.signature = tensor.Signature{Inputs: specs(m.inputs), Outputs: specs(m.outputs)}
	return m, nil
}

func sessionOptions(cfg *Config) (*ort.SessionOptions, error) {
	options, err := ort.NewSessionOptions()
	if err != nil {
		return nil, err
	}
	err = options.SetIntraOpNumThreads(cfg.Threads)
	if cfg.NoSpin {
		err = errors.Join(err, options.AddSessionConfigEntry("session.intra_op.allow_spinning", "0"))
	}
	if err != nil {
		options.Destroy()
		return nil, err
	}
	return options, nil
}

func (m *model) close() { m.session.Destroy() }

// findOutputs fills in the outputs' shapes.
func (m *model) findOutputs() error {
	const rows = 2
	results, err := m.runAlone(m.example(rows), rows)
	if err != nil {
		return fmt.Errorf("%w: it fails on rows of small numbers: %s", ErrModel, firstLine(err))
	}
	for k := range results {
		shape := results[k].Shape
		if len(shape) == 0 || shape[0] != rows {
			return fmt.Errorf("%w: output %q has shape %v for %d rows: its first dimension is not the batch", ErrModel,
				m.outputs[k].name, shape, rows)
		}
		m.outputs[k].spec.Shape = shape[1:]
	}
	return nil
}

// runAlone runs rows outside of the ring and returns the results in new memory.
func (m *model) runAlone(inputs [][]byte, rows int) ([]tensor.Tensor, error) {
	in := make([]ort.Value, len(inputs))
	defer destroy(in)
	for k, data := range inputs {
		n := &m.inputs[k]
		var err error
		if in[k], err = value(n, rows, data[:rows*n.spec.RowBytes()]); err != nil {
			return nil, err
		}
	}
	out := make([]ort.Value, len(m.outputs))
	defer destroy(out)
	if err := m.session.Run(in, out); err != nil {
		clear(out) // values of a failed run cannot be destroyed
		return nil, err
	}
	results := make([]tensor.Tensor, len(out))
	for k, v := range out {
		data, err := bytesOf(v)
		if err != nil {
			return nil, fmt.Errorf("output %q: %w", m.outputs[k].name, err)
		}
		results[k] = tensor.Tensor{DType: m.outputs[k].spec.DType, Data: data}
		for _, d := range v.GetShape() {
			results[k].Shape = append(results[k].Shape, int(d))
		}
	}
	return results, nil
}

func destroy(values []ort.Value) {
	for _, v := range values {
		if v != nil {
			v.Destroy()
		}
	}
}

// warmUp runs batches of several sizes, so that the first requests are not slower.
func (m *model) warmUp(ctx context.Context, maxBatch int) error {
	inputs := m.example(maxBatch)
	for rows := maxBatch; rows > 0 && ctx.Err() == nil; rows /= 2 {
		if _, err := m.runAlone(inputs, rows); err != nil {
			return fmt.Errorf("%w: a batch of %d rows fails: %s", ErrModel, rows, firstLine(err))
		}
	}
	return ctx.Err()
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(strings.TrimSpace(err.Error()), "\n")
	return line
}
