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
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAStageOfAPipelineInC(t *testing.T) {
	t.Parallel()
	prefix, exe := library(t), filepath.Join(built, "stage")
	run(t, "cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"+prefix+"/include", "-o", exe, "../examples/c/stage.c",
		"-L"+prefix+"/lib", "-lringbatch", "-Wl,-rpath,"+prefix+"/lib")
	socket := startBroker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()

	var said strings.Builder
	scale := exec.CommandContext(ctx, exe)
	scale.Env, scale.Stderr = append(os.Environ(), "RINGBATCH_SOCKET="+socket), &said
	must.Do(t, scale.Start())
	defer func() {
		_ = scale.Process.Kill()
		_ = scale.Wait()
		if t.Failed() {
			t.Log(said.String())
		}
	}()

	// The C stage declares the pipeline, so the Go stage below needs no declaration.
	c, err := client.Dial(ctx, "brightness", client.WithSocket(socket), client.WaitForModel())
	must.Do(t, err)
	defer c.Close()
	sig, err := tensor.ParseSignature([]string{"h:f32[64]"}, []string{"y:f32[]"})
	must.Do(t, err)
	served := make(chan error, 1)
	stop, end := context.WithCancel(ctx)
	defer func() { end(); <-served }()
	go func() {
		served <- worker.Serve(stop, worker.Config{Model: "brightness/mean", Signature: sig, Socket: socket},
			func(_ context.Context, b *worker.Batch) error {
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
		outs, err := c.Infer(ctx, x)
		must.Do(t, err)
		y, err := tensor.As[float32](outs[0])
		if err != nil || y[0] < want-1e-4 || y[0] > want+1e-4 {
			t.Errorf("the mean of bytes at %v: %v, %v", want, y, err)
		}
	}
}

// Client, broker and worker are threads of one process here, so the thread
// sanitizer sees all accesses to their shared memory. It must find no race, and
// must find one where a SYNC POINT is weakened: otherwise its silence means nothing.
func TestTheThreadSanitizerSeesNoRaceInSharedMemory(t *testing.T) {
	t.Parallel()
	for _, mutant := range []struct{ name, file, from, to string }{
		{name: "as it is"},
		{"completion without acquire", "shm.h", "(&b->words[slot], memory_order_acquire)", "(&b->words[slot], memory_order_relaxed)"},
		{"entry without release", "shm.c", "atomic_exchange(&p->words->tail, p->tail + 1)",
			"atomic_store_explicit(&p->words->tail, p->tail + 1, memory_order_relaxed)"},
	} {
		t.Run(mutant.name, func(t *testing.T) {
			t.Parallel()
			exe := heapProgram(t, mutant.file, mutant.from, mutant.to)
			if mutant.file == "" {
				execute(t, []string{"TSAN_OPTIONS=halt_on_error=1"}, exe, "1000")
				return
			}
			cmd := exec.Command(exe, "1000")
			cmd.Env = append(os.Environ(), "TSAN_OPTIONS=halt_on_error=1")
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "data race") {
				t.Errorf("the sanitizer did not see it: %v\n%s", err, out)
			}
		})
	}
}

// heapProgram builds testdata/heap.c with the library's sources, after replacing a text in one of them.
func heapProgram(t *testing.T, file, from, to string) string {
	t.Helper()
	copied := t.TempDir()
	must.Do(t, os.CopyFS(filepath.Join(copied, "cbindings"), os.DirFS(".")))
	src := filepath.Join(copied, "cbindings", "src")
	if file != "" {
		path := filepath.Join(src, file)
		text, err := os.ReadFile(path)
		if err != nil || strings.Count(string(text), from) != 1 {
			t.Fatalf("%s: %q stands there %d times, want once (%v)", path, from, strings.Count(string(text), from), err)
		}
		must.Do(t, os.WriteFile(path, []byte(strings.Replace(string(text), from, to, 1)), 0o644))
	}
	library, err := filepath.Glob(filepath.Join(src, "*.c"))
	must.Do(t, err)
	exe := filepath.Join(copied, "heap")
	run(t, "cc", append([]string{"-std=gnu11", "-D_GNU_SOURCE", "-g", "-O0", "-fsanitize=thread", "-pthread", "-o", exe,
		filepath.Join(copied, "cbindings", "testdata", "heap.c")}, library...)...)
	return exe
}
