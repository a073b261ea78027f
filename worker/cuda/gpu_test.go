// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/mlp"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// gpu is a device for a test, which is skipped where there is none.
func gpu(t testing.TB) *device {
	t.Helper()
	d, err := openDevice(0)
	if errors.Is(err, status.ErrNoGPU) {
		t.Skip(err)
	}
	must.Do(t, err)
	t.Cleanup(d.close)
	return d
}

// The same vectors as on the CPU, by the committed PTX.
func TestKernelsOnGPU(t *testing.T) {
	d := gpu(t)
	find := func(v *vector) (cu.Function, error) {
		for _, text := range []string{movePTX, affinePTX, densePTX} {
			if strings.Contains(text, ".entry "+v.kernel+"(") {
				m, err := d.module("test", text)
				if err != nil {
					return cu.Function{}, err
				}
				return function(m, v.kernel)
			}
		}
		return cu.Function{}, fmt.Errorf("no kernel %s", v.kernel)
	}
	for _, v := range vectors() { // not in subtests: those run on other threads
		f, err := find(&v)
		must.Do(t, err)
		after, err := runOnGPU(f, &v)
		if err == nil {
			err = v.check(after)
		}
		if err != nil {
			t.Errorf("%s: %v", v.name, err)
		}
	}
}

func runOnGPU(f cu.Function, v *vector) ([][]byte, error) {
	var args []uint64
	var after [][]byte
	var from []cu.DevicePtr
	for _, a := range v.args {
		switch a := a.(type) {
		case uint64:
			args = append(args, a)
		case []byte:
			p, err := alloc(int64(len(a)))
			if err != nil {
				return nil, err
			}
			defer cu.MemFree(p)
			if err := checked("cuMemcpyHtoD", cu.MemcpyHtoD(p, unsafe.Pointer(&a[0]), int64(len(a)))); err != nil {
				return nil, err
			}
			args, from, after = append(args, word(p)), append(from, p), append(after, make([]byte, len(a)))
		}
	}
	if err := launch(cu.NoStream, f, dims{v.gridX, v.gridY, v.block}, args...); err != nil {
		return nil, err
	}
	if err := checked("cuCtxSynchronize", cu.Synchronize()); err != nil {
		return nil, err
	}
	for i, b := range after {
		if err := checked("cuMemcpyDtoH", cu.MemcpyDtoH(unsafe.Pointer(&b[0]), from[i], int64(len(b)))); err != nil {
			return nil, err
		}
	}
	return after, nil
}

// host runs a broker and a GPU worker, and dials.
func host(t *testing.T, name string, o Options, settings policy.Policy, more ...func(*worker.Config)) (*client.Client, <-chan error) {
	t.Helper()
	m, err := New(name, o)
	if errors.Is(err, status.ErrNoGPU) {
		t.Skip(err)
	}
	must.Do(t, err)
	socket := ringbatchtest.Start(t, broker.Config{DrainTime: time.Second, Logger: slog.Default()}).Socket()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	served := make(chan error, 1)
	cfg := worker.Config{Model: "m", Signature: m.Signature, Socket: socket, Policy: settings}
	for _, set := range more {
		set(&cfg)
	}
	wg.Go(func() { served <- Serve(ctx, cfg, m) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	dial, stop := context.WithTimeout(ctx, 30*time.Second)
	defer stop()
	c, err := client.Dial(dial, "m", client.WithSocket(socket), client.WithWindow(64), client.WaitForModel())
	if err != nil {
		select {
		case e := <-served:
			t.Fatal(err, e)
		default:
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { c.Close() })
	return c, served
}

func TestEchoGivesEveryRowBack(t *testing.T) {
	spec := tensor.Spec{Name: "x", DType: tensor.U8, Shape: []int{40001}}
	c, _ := host(t, "echo", Options{Inputs: []tensor.Spec{spec}},
		policy.New(policy.MaxBatchSize(16), policy.WaitTime(time.Millisecond), policy.Slots(128)))
	var wg sync.WaitGroup
	for i := range 48 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for n := range 20 {
				x := random(uint64(i*100+n), 40001*(1+n%3))
				out, err := c.Infer(context.Background(), x)
				if err != nil {
					t.Error(err)
					return
				}
				if err := same(out[0].Data, x); err != nil {
					t.Error(err)
					return
				}
			}
		}()
	}
	wg.Wait()
}

func TestAffineIsTheCPUs(t *testing.T) {
	spec := tensor.Spec{Name: "x", DType: tensor.F32, Shape: []int{7}}
	c, _ := host(t, "affine", Options{Inputs: []tensor.Spec{spec}, Scale: 3, Offset: 0.5}, policy.New(policy.MaxBatchSize(8)))
	out, err := c.Infer(context.Background(), []float32{0, 1, 2, 3, 4, 5, 6})
	must.Do(t, err)
	must.Check(t, same(out[0].Data, toBytes([]float32{0.5, 3.5, 6.5, 9.5, 12.5, 15.5, 18.5})))
}

func TestPerceptronAgreesWithTheCPU(t *testing.T) {
	for _, sizes := range [][]int{{1024, 4096, 4096, 1024}, {100, 70, 33}} {
		t.Run(fmt.Sprint(sizes), func(t *testing.T) {
			reference, err := mlp.New(mlp.Config{Sizes: sizes, Seed: 1})
			must.Do(t, err)
			conn, _ := host(t, "mlp", Options{Sizes: sizes, Seed: 1}, policy.New(policy.MaxBatchSize(40)))
			for _, rows := range []int{1, 5, 32, 40} {
				x, want := floats(uint64(rows), rows*reference.In()), make([]float32, rows*reference.Out())
				reference.Forward(want, x, rows)
				out, err := conn.Infer(context.Background(), x)
				must.Do(t, err)
				got, err := tensor.As[float32](out[0])
				must.Do(t, err)
				if err := near(got, want, 1e-7); err != nil {
					t.Errorf("%d rows: %v", rows, err)
				}
			}
		})
	}
}

// Padding may be many times the largest batch.
func TestRowsOfPaddingHaveRoomOnTheGPU(t *testing.T) {
	const padTo, width = 8192, 4096 // 128 MiB for a buffer
	spec := tensor.Spec{Name: "x", DType: tensor.F32, Shape: []int{width}}
	c, _ := host(t, "affine", Options{Inputs: []tensor.Spec{spec}, Scale: 2}, policy.New(policy.MaxBatchSize(2)),
		func(cfg *worker.Config) { cfg.Pad, cfg.PadTo = "fixed", padTo })
	x := floats(1, width)
	out, err := c.Infer(context.Background(), x)
	must.Do(t, err)
	got, err := tensor.As[float32](out[0])
	must.Do(t, err)
	for i := range x {
		x[i] *= 2
	}
	must.Check(t, near(got, x, 1e-7))
}

// badPTX has a kernel that writes to address 8, and the sum of a row.
const badPTX = `.version 7.0
.target sm_75
.address_size 64
.visible .entry bad(.param .u64 a)
{
	.reg .u64 %r<2>;
	mov.u64 %r1, 8;
	st.global.u64 [%r1], %r1;
	ret;
}
`

// The broker runs the batch elsewhere when this process ends, which it does not here.
func TestAnIllegalAddressEndsTheWorkerWithoutAnAnswer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bad.ptx")
	must.Do(t, os.WriteFile(path, []byte(badPTX), 0o600))
	spec := []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{4}}}
	out := []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{4}}}
	c, served := host(t, "ptx", Options{PTX: path, Kernel: "bad", Signature: tensor.Signature{Inputs: spec, Outputs: out}},
		policy.New(policy.MaxBatchSize(8)))
	ctx, cancel := context.WithCancel(context.Background())
	answer := make(chan error, 1)
	go func() {
		_, err := c.Infer(ctx, []float32{1, 2, 3, 4})
		answer <- err
	}()
	if err := <-served; !errors.Is(err, ErrLost) || !strings.Contains(err.Error(), "CUDA_ERROR_ILLEGAL_ADDRESS") {
		t.Errorf("Serve ended with %v", err)
	}
	cancel()
	if err := <-answer; !errors.Is(err, context.Canceled) {
		t.Errorf("the request ended with %v", err)
	}
}

// The example in examples/cuda, with the weights of its README.
func TestTheExampleKernel(t *testing.T) {
	weights := make([]float32, 650)
	for i := range weights[:640] {
		weights[i] = 0.01
	}
	for i := range 10 {
		weights[640+i] = float32(i)
	}
	path := filepath.Join(t.TempDir(), "weights.bin")
	must.Do(t, os.WriteFile(path, toBytes(weights), 0o600))
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.F32, Shape: []int{64}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.F32, Shape: []int{10}}},
	}
	c, _ := host(t, "ptx", Options{PTX: "../../examples/cuda/forward.ptx", Kernel: "forward", Weights: path, Signature: sig},
		policy.New(policy.MaxBatchSize(32)))
	x := make([]float32, 3*64)
	for i := range x {
		x[i] = float32(1 + i/64)
	}
	out, err := c.Infer(context.Background(), x)
	must.Do(t, err)
	want := make([]float32, 30)
	for i := range want {
		want[i] = 0.64*float32(1+i/10) + float32(i%10)
	}
	got, err := tensor.As[float32](out[0])
	must.Do(t, err)
	must.Check(t, near(got, want, 1e-5))
}
