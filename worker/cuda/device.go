// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

import (
	_ "embed"
	"fmt"
	"runtime"
	"unsafe"

	"github.com/ringbatch/ringbatch/status"
	"gorgonia.org/cu"
)

// Built says whether this binary has GPU workers at all.
const Built = true

// The kernels, compiled by make cuda-ptx; CI compares them with their sources.
var (
	//go:embed kernels/move.ptx
	movePTX string
	//go:embed kernels/affine.ptx
	affinePTX string
	//go:embed kernels/dense.ptx
	densePTX string
)

// device is one GPU with a context that belongs to the calling thread.
type device struct {
	dev             cu.Device
	ctx             cu.CUContext
	name            string
	gather, scatter cu.Function
}

// Describe says which GPUs there are, or why there are none.
func Describe() ([]string, error) {
	if err := load(); err != nil {
		return nil, err
	}
	n, err := cu.NumDevices()
	if err != nil {
		return nil, checked("cuDeviceGetCount", err)
	}
	var list []string
	for i := range n {
		dev, err := cu.GetDevice(i)
		if err != nil {
			return nil, checked("cuDeviceGet", err)
		}
		name, err := dev.Name()
		if err != nil {
			return nil, checked("cuDeviceGetName", err)
		}
		list = append(list, name)
	}
	return list, nil
}

// openDevice makes a context. The calling goroutine keeps its thread until
// close: CUDA ties the context to it.
func openDevice(number int) (d *device, err error) {
	if err := load(); err != nil {
		return nil, err
	}
	n, err := cu.NumDevices()
	if err != nil {
		return nil, checked("cuDeviceGetCount", err)
	}
	if number < 0 || number >= n {
		return nil, fmt.Errorf("%w: GPU %d was asked for, this process sees %d", status.ErrNoGPU, number, n)
	}
	d = &device{}
	if d.dev, err = cu.GetDevice(number); err != nil {
		return nil, checked("cuDeviceGet", err)
	}
	if d.name, err = d.dev.Name(); err != nil {
		return nil, checked("cuDeviceGetName", err)
	}
	major, err := d.dev.Attribute(cu.ComputeCapabilityMajor)
	if err != nil {
		return nil, checked("cuDeviceGetAttribute", err)
	}
	minor, err := d.dev.Attribute(cu.ComputeCapabilityMinor)
	if err != nil {
		return nil, checked("cuDeviceGetAttribute", err)
	}
	if 10*major+minor < 75 {
		return nil, fmt.Errorf("%w: %s has compute capability %d.%d, 7.5 is the least", status.ErrNoGPU, d.name, major, minor)
	}
	runtime.LockOSThread()
	if d.ctx, err = d.dev.MakeContext(cu.SchedAuto); err != nil {
		runtime.UnlockOSThread()
		return nil, checked("cuCtxCreate", err)
	}
	defer func() {
		if err != nil {
			d.close()
			d = nil
		}
	}()
	move, err := d.module("move", movePTX)
	if err != nil {
		return d, err
	}
	if d.gather, err = function(move, "rb_gather"); err != nil {
		return d, err
	}
	d.scatter, err = function(move, "rb_scatter")
	return d, err
}

// close destroys the context and with it everything that was made in it.
func (d *device) close() {
	_ = d.ctx.Destroy() // an error changes nothing: the process does not use it any more
	runtime.UnlockOSThread()
}

func (d *device) module(name, ptx string) (cu.Module, error) {
	m, err := cu.LoadData(ptx)
	if err != nil {
		return m, fmt.Errorf("load kernels %s: %w", name, checked("cuModuleLoadData", err))
	}
	return m, nil
}

func function(m cu.Module, name string) (cu.Function, error) {
	f, err := m.Function(name)
	if err != nil {
		return f, fmt.Errorf("kernel %q: %w", name, checked("cuModuleGetFunction", err))
	}
	return f, nil
}

func alloc(size int64) (cu.DevicePtr, error) {
	p, err := cu.MemAlloc(max(size, 1))
	if err != nil {
		return 0, fmt.Errorf("%d MiB of device memory: %w", size>>20, checked("cuMemAlloc", err))
	}
	return p, nil
}

// upload copies floats into new device memory.
func upload(v []float32) (cu.DevicePtr, error) {
	p, err := alloc(int64(4 * len(v)))
	if err != nil {
		return 0, err
	}
	return p, checked("cuMemcpyHtoD", cu.MemcpyHtoD(p, unsafe.Pointer(&v[0]), int64(4*len(v))))
}

// dims is the shape of a launch.
type dims struct{ gridX, gridY, block int }

// launch queues a kernel. All kernels take 64-bit words only, see
// kernels/common.h.
func launch(stream cu.Stream, f cu.Function, d dims, args ...uint64) error {
	params := make([]unsafe.Pointer, len(args))
	for i := range args {
		params[i] = unsafe.Pointer(&args[i])
	}
	return checked("cuLaunchKernel", f.Launch(d.gridX, max(d.gridY, 1), 1, d.block, 1, 1, 0, stream, params))
}

// spread is a launch of about n threads in blocks of 256, for kernels that
// loop over their elements.
func spread(n int) dims { return dims{gridX: min(max(1, (n+255)/256), 4096), block: 256} }

// word is a device pointer or a number as a kernel's argument.
func word[T cu.DevicePtr | int | int64 | uint64](v T) uint64 { return uint64(v) }
