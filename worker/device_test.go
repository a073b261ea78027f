// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"encoding/binary"
	"log/slog"
	"math"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/inside"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// memfdDevice is a GPU whose memory is a memfd.
type memfdDevice struct {
	allocated *atomic.Int32
	mem       []byte
	work      func() // of the GPU, which Synchronize waits for
}

func (d *memfdDevice) Allocate(bytes int64, _ int) (int, string, error) {
	d.allocated.Add(1)
	fd, err := unix.MemfdCreate("device", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, bytes)
	}
	return fd, "GPU-0", err
}

func (d *memfdDevice) Import(fd int, bytes int64, _ string) (err error) {
	d.mem, err = unix.Mmap(fd, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	return err
}

func (d *memfdDevice) Synchronize() {
	if d.work != nil {
		d.work()
	}
}

func (d *memfdDevice) Close() { _ = unix.Munmap(d.mem) }

// value is where a batch's row of a tensor of one number lies, wherever that is.
func value(w *Worker, d *memfdDevice, p *shm.Plane, slot uint32) []byte {
	if p.Spec.OnDevice() {
		return d.mem[p.Offset+int64(slot)*p.Stride:][:4]
	}
	return p.Row(inner{w}.Session().Planes.Bytes(), slot)
}

// serveDevices starts a broker until the test ends.
func serveDevices(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "b.sock")
	b, err := broker.New(broker.Config{Socket: socket, OpenFolder: true, DrainTime: time.Second, Logger: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = b.Serve(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return socket
}

// A pipeline whose clients are on the host, with a device tensor between its stages:
// the first worker allocates it, and only who uses it needs a GPU.
func TestAPipelineHasDeviceMemoryBetweenItsStages(t *testing.T) {
	socket := serveDevices(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const pipeline = `{"inputs": ["x:f32[1]"], "stages": [{"name": "a", "inputs": ["x"], "outputs": ["h:f32[1]@device:0"]},
		{"name": "b", "inputs": ["h"], "outputs": ["y:f32[1]"]}, {"name": "c", "inputs": ["y"], "outputs": ["z:f32[1]"]}]}`
	var allocated atomic.Int32
	for _, stage := range [][3]string{
		{"p/a", "x:f32[1]", "h:f32[1]@device:0"}, {"p/b", "h:f32[1]@device:0", "y:f32[1]"}, {"p/c", "y:f32[1]", "z:f32[1]"},
	} {
		signature, err := tensor.ParseSignature(stage[1:2], stage[2:])
		must.Do(t, err)
		d, ctx := &memfdDevice{allocated: &allocated}, ctx
		cfg := Config{Model: stage[0], Signature: signature, Socket: socket, Pipeline: pipeline}
		if stage[0] != "p/c" { // nothing of it is on the device
			ctx = inside.WithDevice(ctx, d)
		}
		w, err := Attach(ctx, cfg)
		must.Do(t, err)
		served := make(chan struct{})
		go func() {
			defer close(served)
			for {
				b, err := w.Next(ctx)
				if err != nil {
					return
				}
				for _, slot := range b.Slots() {
					in := math.Float32frombits(binary.LittleEndian.Uint32(value(w, d, &w.session.Layout.Inputs[0], slot)))
					binary.LittleEndian.PutUint32(value(w, d, &w.session.Layout.Outputs[0], slot), math.Float32bits(in+1))
				}
				b.Complete()
			}
		}()
		defer func() { cancel(); <-served; w.Close() }()
	}
	c, err := client.Dial(ctx, "p", client.WithSocket(socket))
	must.Do(t, err)
	defer c.Close()
	for i := range 20 {
		out, err := c.Infer(ctx, tensor.Of("x", []float32{float32(i)}, 1, 1))
		must.Do(t, err)
		z, err := tensor.As[float32](out[0])
		if err != nil || z[0] != float32(i)+3 {
			t.Errorf("%d: %v, %v", i, z, err)
		}
	}
	if n := allocated.Load(); n != 1 {
		t.Errorf("it was allocated %d times", n)
	}
}

// A worker that is closed while its kernels still write: its requests fail, and their slots go to the next one, only
// after the GPU has stopped.
func TestClosingWaitsForTheGPU(t *testing.T) {
	var allocated atomic.Int32
	d := &memfdDevice{allocated: &allocated}
	signature, err := tensor.ParseSignature([]string{"x:f32[1]"}, []string{"h:f32[1]@device:0"})
	must.Do(t, err)
	cfg := Config{Model: "p/a", Signature: signature, Socket: serveDevices(t), Pipeline: `{"inputs": ["x:f32[1]"],
		"stages": [{"name": "a", "inputs": ["x"], "outputs": ["h:f32[1]@device:0"]},
			{"name": "b", "inputs": ["h"], "outputs": ["y:f32[1]"]}]}`}
	w, err := Attach(inside.WithDevice(t.Context(), d), cfg)
	must.Do(t, err)
	c, err := client.Dial(t.Context(), "p", client.WithSocket(cfg.Socket))
	must.Do(t, err)
	defer c.Close()
	req, err := c.Fill(t.Context(), []float32{1})
	if err == nil {
		err = req.Commit(t.Context())
	}
	if err == nil {
		_, err = w.Next(t.Context())
	}
	must.Do(t, err)
	waited := 0
	d.work = func() {
		if err := req.Poll(); waited == 0 && (err != status.ErrNotDone || w.gone.Load()) {
			t.Errorf("it ended before the GPU had stopped: %v", err)
		}
		waited++
	}
	w.Close()
	if err := req.Wait(t.Context()); err == nil || waited == 0 {
		t.Errorf("ended with %v after waiting %d times", err, waited)
	}
}
