// SPDX-License-Identifier: Apache-2.0

package cbindings

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAStageOfAPipelineInC(t *testing.T) {
	t.Parallel()
	prefix, exe := library(t), filepath.Join(built, "stage")
	run(t, "cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"+prefix+"/include", "-o", exe, "../examples/c/stage.c", "-L"+prefix+"/lib", "-lringbatch", "-Wl,-rpath,"+prefix+"/lib")
	socket := startBroker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()

	var said strings.Builder
	scale := exec.CommandContext(ctx, exe)
	scale.Env, scale.Stderr = append(os.Environ(), "RINGBATCH_SOCKET="+socket), &said
	if err := scale.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = scale.Process.Kill()
		_ = scale.Wait()
		if t.Failed() {
			t.Log(said.String())
		}
	}()

	// It declares the pipeline; once that is there the other stage, here, needs no declaration.
	c, err := client.Dial(ctx, "brightness", client.WithSocket(socket), client.WaitForModel())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sig, err := tensor.ParseSignature([]string{"h:f32[64]"}, []string{"y:f32[]"})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	stop, end := context.WithCancel(ctx)
	defer func() { end(); <-served }()
	go func() {
		served <- worker.Serve(stop, worker.Config{Model: "brightness/mean", Signature: sig, Socket: socket}, func(_ context.Context, b *worker.Batch) error {
			for i := range b.Rows() {
				sum := float32(0)
				for _, h := range worker.Row[float32](b.Input(0), i) {
					sum += h
				}
				worker.Row[float32](b.Output(0), i)[0] = sum / 64
			}
			return nil
		})
	}()
	for _, want := range []float32{0, 0.2, 1} {
		x := make([]byte, 64)
		for i := range x {
			x[i] = byte(255 * want)
		}
		y := make([]float32, 1)
		if err := c.InferInto(ctx, []any{y}, x); err != nil || y[0] < want-1e-4 || y[0] > want+1e-4 {
			t.Errorf("the mean of bytes at %v: %v, %v", want, y, err)
		}
	}
}
