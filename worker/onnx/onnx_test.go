// SPDX-License-Identifier: Apache-2.0

package onnx_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/onnx"
)

func needLibrary(t *testing.T) {
	if _, err := os.Stat(os.Getenv("ONNXRUNTIME_LIBRARY")); err != nil {
		t.Skip("no ONNX Runtime here: ONNXRUNTIME_LIBRARY says where libonnxruntime is")
	}
}

// serve serves a file of testdata and gives a client of it.
func serve(t *testing.T, file string, settings ...policy.Setting) *client.Client {
	t.Helper()
	needLibrary(t)
	b := ringbatchtest.Start(t, broker.Config{})
	ctx, leave := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() {
		served <- onnx.Serve(ctx, onnx.Config{File: filepath.Join("testdata", file), Threads: 1,
			Worker: worker.Config{Model: "m", Socket: b.Socket(), Policy: policy.New(settings...)}})
		leave()
	}()
	t.Cleanup(func() {
		leave()
		if err := <-served; err != nil {
			t.Errorf("served: %v", err)
		}
	})
	return b.Dial(t, "m", client.WaitForModel())
}

func TestRowsOfManyClientsAreAnsweredRightWhereverTheyLie(t *testing.T) {
	c := serve(t, "linear.onnx", policy.MaxBatchSize(8), policy.WaitTime(2*time.Millisecond))
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 1))
			for range 200 {
				rows := 1 + random.IntN(3) // so that slots are freed and taken in other orders
				x, bias := make([]float32, rows*4), make([]int64, rows*3)
				for i := range x {
					x[i] = float32(random.IntN(9))
				}
				for i := range bias {
					bias[i] = int64(random.IntN(50))
				}
				outs, err := c.Infer(t.Context(), x, bias)
				if err != nil {
					t.Error(err)
					return
				}
				y, _ := tensor.As[float32](outs[0])
				best, _ := tensor.As[int64](outs[1])
				for r := range rows {
					at := 0
					for j := range 3 {
						want := float32(bias[r*3+j])
						for i := range 4 {
							want += x[r*4+i] * float32(i*3+j)
						}
						if y[r*3+j] != want {
							t.Errorf("row %d: y[%d] is %v, want %v", r, j, y[r*3+j], want)
							return
						}
						if y[r*3+j] > y[r*3+at] {
							at = j
						}
					}
					if best[r] != int64(at) {
						t.Errorf("row %d: the largest is %d, want %d", r, best[r], at)
						return
					}
				}
			}
		})
	}
	all.Wait()
}

func TestAModelWhoseRowsDependOnOneAnotherIsServedOneByOne(t *testing.T) {
	c := serve(t, "mixes.onnx", policy.MaxBatchSize(1))
	outs, err := c.Infer(t.Context(), []float32{1, 2, 3, 4})
	if err != nil {
		t.Fatal(err)
	}
	if y, _ := tensor.As[float32](outs[0]); y[3] != 0 {
		t.Errorf("a row less its own mean over the batch is %v", y)
	}
}

func TestOutputsArePickedInOrder(t *testing.T) {
	needLibrary(t)
	for want, names := range map[string][]string{
		"best:i64[] y:f32[3]": {"best", "y"},
		"best:i64[]":          {"best"},
		"y:f32[3] best:i64[]": nil,
	} {
		var got string
		ctx, stop := context.WithCancel(t.Context())
		cfg := onnx.Config{File: "testdata/linear.onnx", Outputs: names, Worker: worker.Config{Model: "m", Socket: "/nowhere"}}
		cfg.Ready = func(w worker.Config) { got = w.Signature.String(); stop() }
		_ = onnx.Serve(ctx, cfg)
		if _, outputs, _ := strings.Cut(got, " -> "); outputs != want {
			t.Errorf("outputs %v: %q, want %q", names, got, want)
		}
	}
}

func TestWhatCannotBeServedIsSaidInOneSentence(t *testing.T) {
	for _, c := range []struct {
		file    string
		dims    map[string]int
		want    string
		outputs []string
	}{
		{"none.onnx", nil, "no such file", nil},
		{"make.py", nil, "testdata/make.py", nil},
		{"fixed.onnx", nil, "fixed batch of 1", nil},
		{"open.onnx", nil, "--dim x.0=128", nil},
		{"open.onnx", map[string]int{"x.0": 4, "y.0": 3}, "--dim y.0: the graph has no such open dimension", nil},
		{"open.onnx", map[string]int{"x.0": 0}, "at least 1", nil},
		{"whole.onnx", nil, "its first dimension is not the batch", nil},
		{"mixes.onnx", nil, "depend on one another", nil},
		{"nearly.onnx", nil, "a row gives other results beside other rows", nil},
		{"linear.onnx", nil, "--output z: want different outputs of the graph; it has y, best", []string{"y", "z"}},
		{"linear.onnx", nil, "--output y: want different outputs", []string{"y", "y"}},
	} {
		t.Run(c.file+" "+c.want, func(t *testing.T) {
			needLibrary(t)
			cfg := onnx.Config{File: filepath.Join("testdata", c.file), Dims: c.dims, Outputs: c.outputs}
			cfg.Worker = worker.Config{Model: "m", Socket: "/nowhere"}
			err := onnx.Serve(t.Context(), cfg)
			if !errors.Is(err, onnx.ErrModel) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v; want %q in it", err, c.want)
			}
		})
	}
}
