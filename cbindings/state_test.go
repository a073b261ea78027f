// SPDX-License-Identifier: Apache-2.0

package cbindings

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// hashing is testdata/hashing.c with its arguments, for the broker at the socket.
func hashing(ctx context.Context, t *testing.T, socket string, args ...string) *exec.Cmd {
	t.Helper()
	exe := sanitizedProgram(t, "address,undefined", "hashing", "testdata/hashing.c")
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Env = append(os.Environ(), "RINGBATCH_SOCKET="+socket)
	cmd.Stderr = os.Stderr
	return cmd
}

func hash(h, x int64) int64 { return (h^x)*0x100000001b3 + 1 }

// serveHash serves the model of hashing.c in Go.
func serveHash(t *testing.T, socket string) {
	t.Helper()
	sig, err := tensor.ParseSignature([]string{"x:i64[]"}, []string{"y:i64[]"}, "h:i64[100]")
	must.Do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = worker.Serve(ctx, worker.Config{Model: "hash", Signature: sig, Socket: socket, WaitForBroker: time.Minute},
			func(_ context.Context, b *worker.Batch) error {
				for i := range b.Rows() {
					x := worker.Row[int64](b.Input(0), i)[0]
					h, next := worker.Row[int64](b.State(0), i), worker.Row[int64](b.NextState(0), i)
					for j := range h {
						next[j] = hash(h[j], x)
					}
					worker.Row[int64](b.Output(0), i)[0] = next[99]
				}
				return nil
			})
	}()
	t.Cleanup(func() { cancel(); <-done })
}

// Each step runs on the worker in Go or on one in C, which dies with every fifth batch.
func TestSequencesInCOutliveTheirWorkers(t *testing.T) {
	t.Parallel()
	socket := startBroker(t)
	serveHash(t, socket)
	ctx, cancel := context.WithCancel(context.Background())
	deaths, done := 0, make(chan struct{})
	go func() {
		defer close(done)
		for hashing(ctx, t, socket, "worker", "5").Run() != nil && ctx.Err() == nil {
			deaths++
		}
	}()
	out, err := hashing(context.Background(), t, socket, "client").Output()
	cancel()
	<-done
	if err != nil || string(out) != "ok\n" {
		t.Errorf("%v: %s", err, out)
	}
	if deaths == 0 {
		t.Error("no worker died")
	}
}

func TestARestartedBrokerHasLostTheStateOfCClients(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "b.sock")
	stop := serveAt(t, socket)
	serveHash(t, socket)
	cmd := hashing(t.Context(), t, socket, "restart")
	in, err := cmd.StdinPipe()
	must.Do(t, err)
	out, err := cmd.StdoutPipe()
	must.Do(t, err)
	must.Do(t, cmd.Start())
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "ready" {
		t.Fatal(lines.Text(), cmd.Wait())
	}
	stop()
	serveAt(t, socket)
	_, err = in.Write([]byte("\n"))
	must.Do(t, err)
	if !lines.Scan() || lines.Text() != "ok" {
		t.Error(lines.Text())
	}
	must.Do(t, cmd.Wait())
}

func TestAGoClientStepsThroughACWorker(t *testing.T) {
	t.Parallel()
	socket := startBroker(t)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute) // it may build first
	cmd := hashing(ctx, t, socket, "worker", "0")
	must.Do(t, cmd.Start())
	defer func() { cancel(); _ = cmd.Wait() }()
	c, err := client.Dial(ctx, "hash", client.WithSocket(socket), client.WaitForModel())
	must.Do(t, err)
	defer c.Close()
	q, err := c.Sequence(ctx, 2)
	must.Do(t, err)
	want := [2]int64{}
	for n := range int64(50) {
		if n == 30 {
			must.Do(t, q.Reset(1))
			want[1] = 0
		}
		want[0], want[1] = hash(want[0], n), hash(want[1], -n)
		outs, err := q.Step(ctx, []int64{n, -n})
		must.Do(t, err)
		if y, err := tensor.As[int64](outs[0]); err != nil || [2]int64(y) != want {
			t.Fatalf("step %d: %v %v, not %v", n, y, err, want)
		}
	}
	h, err := q.State(ctx, "h")
	must.Do(t, err)
	if v, err := tensor.As[int64](h); err != nil || v[0] != want[0] || v[199] != want[1] {
		t.Error(v, err)
	}
}
