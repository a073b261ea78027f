// SPDX-License-Identifier: Apache-2.0

package cbindings

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// startExample builds a program of examples/c, and runs it until the test ends.
func startExample(ctx context.Context, t *testing.T, name, socket string) {
	prefix, exe := library(t), filepath.Join(built, name)
	run(t, "cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I"+prefix+"/include", "-o", exe, "../examples/c/"+name+".c",
		"-L"+prefix+"/lib", "-lringbatch", "-Wl,-rpath,"+prefix+"/lib")
	var said strings.Builder
	p := exec.CommandContext(ctx, exe)
	p.Env, p.Stderr = append(os.Environ(), "RINGBATCH_SOCKET="+socket), &said
	must.Do(t, p.Start())
	t.Cleanup(func() {
		_ = p.Process.Kill()
		_ = p.Wait()
		if t.Failed() {
			t.Log(said.String())
		}
	})
}

// collatz is the path of n → n/2 or 3n+1 down to 1.
func collatz(n int64) (path []int64) {
	for ; n > 1; n = []int64{n / 2, 3*n + 1}[n%2] {
		path = append(path, n)
	}
	return append(path, 1)
}

func TestAWorkerWithLanesInC(t *testing.T) {
	t.Parallel()
	socket := startBroker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	startExample(ctx, t, "lanes", socket)
	c, err := client.Dial(ctx, "collatz", client.WithSocket(socket), client.WaitForModel())
	must.Do(t, err)
	defer c.Close()
	var all sync.WaitGroup
	for n := range int64(60) {
		all.Go(func() {
			outs, err := c.Infer(ctx, []int64{n})
			if n == 0 {
				must.Fail(t, "0", err, status.ErrFailed)
				return
			}
			if err != nil {
				t.Errorf("%d: %v", n, err)
				return
			}
			if path, err := tensor.As[int64](outs[0]); err != nil || !slices.Equal(path, collatz(n)) {
				t.Errorf("the path of %d: %v, %v", n, path, err)
			}
		})
	}
	var path []int64
	for part, err := range c.Stream(ctx, []int64{27}) {
		must.Do(t, err)
		numbers, err := tensor.As[int64](part.Tensor)
		must.Do(t, err)
		path = append(path, numbers...)
	}
	if !slices.Equal(path, collatz(27)) {
		t.Errorf("a stream of the path of 27: %v", path)
	}
	all.Wait()
	rounds := max(1, len(collatz(27))-1) + 1 // that of 0 ends in its first one
	for n := int64(1); n < 60; n++ {
		rounds += max(1, len(collatz(n))-1)
	}
	wantRounds(ctx, t, socket, rounds)
}

// wantRounds waits until the only worker has reported as many rounds.
func wantRounds(ctx context.Context, t *testing.T, socket string, want int) {
	t.Helper()
	must.Do(t, testbed.Eventually(time.Minute, func() error {
		s, err := admin.New(socket).Stats(ctx)
		if err != nil {
			return err
		}
		if w := s.Models[0].Workers[0]; w.Rounds != uint64(want) {
			return fmt.Errorf("%s: %d rounds, want %d", w.Doing(), w.Rounds, want)
		}
		return nil
	}))
}

func TestAStageOfAPipelineInC(t *testing.T) {
	t.Parallel()
	socket := startBroker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	startExample(ctx, t, "stage", socket)

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

// heapProgram builds testdata/heap.c with the library, after replacing a text in one of its files.
func heapProgram(t *testing.T, file, from, to string) string {
	t.Helper()
	if file == "" {
		return sanitizedProgram(t, "thread", "heap", "testdata/heap.c")
	}
	copied := t.TempDir()
	must.Do(t, os.CopyFS(copied, os.DirFS(".")))
	path := filepath.Join(copied, "src", file)
	text, err := os.ReadFile(path)
	if err != nil || strings.Count(string(text), from) != 1 {
		t.Fatalf("%s: %q stands there %d times, want once (%v)", path, from, strings.Count(string(text), from), err)
	}
	must.Do(t, os.WriteFile(path, []byte(strings.Replace(string(text), from, to, 1)), 0o644))
	changed := []string{path}
	if strings.HasSuffix(file, ".h") {
		changed, err = filepath.Glob(filepath.Join(copied, "src", "*.c"))
		must.Do(t, err)
	}
	exe := filepath.Join(copied, "heap")
	must.Do(t, linkSanitized(t, "thread", exe, append(changed, filepath.Join(copied, "testdata", "heap.c"))...))
	return exe
}
