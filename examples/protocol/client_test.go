// SPDX-License-Identifier: Apache-2.0

package protocol

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// client.py follows docs/protocol.md and uses none of our code: its output shows
// whether document and broker agree.
func TestAClientWrittenFromTheDocumentIsServed(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{4}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{4}}},
	}
	dir, err := os.MkdirTemp("", "rb") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "broker.sock")
	models := []broker.ModelConfig{{Name: "idle", Signature: sig}, {Name: "double", Signature: sig}}
	b, err := broker.New(broker.Config{Socket: socket, DrainTime: time.Second, Models: models})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 2)
	go func() { served <- b.Serve(ctx) }()
	go func() {
		served <- worker.Serve(ctx, worker.Config{Model: "double", Signature: sig, Socket: socket}, double)
	}()
	out, err := exec.CommandContext(ctx, python, "client.py", socket, "double", "idle").CombinedOutput()
	if err != nil {
		t.Fatalf("client.py: %v\n%s", err, out)
	}
	got := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n")
	want := []string{ // how each line begins
		"one: [[2.0, 4.0, 6.0, 8.0]]",
		"several: [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]",
		"rows: [[2.0, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0], [6.0, 6.0, 6.0, 6.0]]",
		"failed: status 1: a number is negative",
		"many: 999000.0",
		"deadline: status 2",
		"cancel: status 3",
		"version: status 13",
		"model: status 12",
		"window: status 18",
		"generation: status 10: the broker hung up",
	}
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("it printed:\n%s\nnot:\n%s", out, strings.Join(want, "\n"))
	}
	cancel()
	for range 2 {
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

func double(_ context.Context, b *worker.Batch) error {
	for i := range b.Len() {
		q := b.Request(i)
		for row := q.Row; row < q.Row+q.Rows; row++ {
			x, y := worker.Row[float32](b.Input(0), row), worker.Row[float32](b.Output(0), row)
			for j := range x {
				if y[j] = 2 * x[j]; x[j] < 0 {
					b.Fail(i, errors.New("a number is negative"))
				}
			}
		}
	}
	return nil
}
