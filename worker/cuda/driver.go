// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

// Additions to gorgonia.org/cu: loading the driver on demand, registering
// memory, and the names of errors. The project's loader is linked before the
// system's driver library, so that the binary starts without a driver.

/*
#cgo LDFLAGS: -L${SRCDIR}/../../build/cuda/lib -lcuda -ldl
#include <cuda.h>
#include <stdlib.h>

// Defined in the libcuda.a of hack/cuda/toolchain.py; absent when linked
// against the driver's own library, which the loader has then brought in.
extern const char *ringbatch_cuda_load(void) __attribute__((weak));

static const char *rb_load(void) { return ringbatch_cuda_load ? ringbatch_cuda_load() : NULL; }

static int rb_init(void) { return cuInit(0); }

static int rb_register(void *p, size_t n) {
	return cuMemHostRegister(p, n, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
}

static int rb_device_pointer(void *p, CUdeviceptr *d) { return cuMemHostGetDevicePointer(d, p, 0); }

static int rb_unregister(void *p) { return cuMemHostUnregister(p); }

static int rb_alloc_host(void **p, size_t n) {
	return cuMemHostAlloc(p, n, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
}

static int rb_free_host(void *p) { return cuMemFreeHost(p); }

static const char *rb_error_name(int code) {
	const char *name = NULL;
	if (cuGetErrorName((CUresult)code, &name) != CUDA_SUCCESS) return NULL;
	return name;
}
*/
import "C"

import (
	"fmt"
	"reflect"
	"sync"
	"unsafe"

	"github.com/ringbatch/ringbatch/status"
	"gorgonia.org/cu"
)

// load brings the driver in, once per process.
var load = sync.OnceValue(func() error {
	if why := C.rb_load(); why != nil {
		return fmt.Errorf("%w: the NVIDIA driver is not installed (%s)", status.ErrNoGPU, C.GoString(why))
	}
	if err := check("cuInit", int(C.rb_init())); err != nil {
		return fmt.Errorf("%w: %v", status.ErrNoGPU, err)
	}
	if n, err := cu.NumDevices(); err != nil || n == 0 {
		return fmt.Errorf("%w: the driver sees none (is CUDA_VISIBLE_DEVICES empty?)", status.ErrNoGPU)
	}
	return nil
})

// Error is a CUDA call that failed.
type Error struct {
	Call string
	Code int
	Name string // CUDA_ERROR_…
}

func (e *Error) Error() string { return e.Call + ": " + e.Name }

// Lost reports whether the context can do no more work: these errors are
// "sticky", every later call returns them again.
func (e *Error) Lost() bool {
	switch {
	case e.Code == 46, e.Code == 214, e.Code == 220, e.Code == 221, e.Code == 226: // device unavailable, ECC, NVLink, contained
		return true
	case e.Code == 700, e.Code == 702, e.Code == 709: // illegal address, launch timeout, context destroyed
		return true
	case e.Code >= 710 && e.Code <= 719, e.Code == 721: // asserts and faults in kernels, launch failed
		return true
	case e.Code >= 805 && e.Code <= 810: // the MPS server went away
		return true
	case e.Code == 4, e.Code == 999: // deinitialised, unknown
		return true
	}
	return false
}

func check(call string, code int) error {
	if code == 0 {
		return nil
	}
	name := C.GoString(C.rb_error_name(C.int(code)))
	if name == "" {
		name = fmt.Sprintf("CUDA error %d", code)
	}
	return &Error{call, code, name}
}

// checked gives an error of package cu its call and its official name.
func checked(call string, err error) error {
	if err == nil {
		return nil
	}
	if v := reflect.ValueOf(err); v.Kind() == reflect.Int {
		return check(call, int(v.Int()))
	}
	return fmt.Errorf("%s: %w", call, err)
}

// register maps host memory into the device and pins it.
func register(p unsafe.Pointer, size int64) (cu.DevicePtr, error) {
	if err := check("cuMemHostRegister", int(C.rb_register(p, C.size_t(size)))); err != nil {
		return 0, err
	}
	var d C.CUdeviceptr
	if err := check("cuMemHostGetDevicePointer", int(C.rb_device_pointer(p, &d))); err != nil {
		C.rb_unregister(p)
		return 0, err
	}
	return cu.DevicePtr(d), nil
}

func unregister(p unsafe.Pointer) error {
	return check("cuMemHostUnregister", int(C.rb_unregister(p)))
}

// hostWords allocates n words of pinned memory that the device can read.
func hostWords(n int) ([]uint32, cu.DevicePtr, error) {
	var p unsafe.Pointer
	if err := check("cuMemHostAlloc", int(C.rb_alloc_host(&p, C.size_t(4*n)))); err != nil {
		return nil, 0, err
	}
	var d C.CUdeviceptr
	if err := check("cuMemHostGetDevicePointer", int(C.rb_device_pointer(p, &d))); err != nil {
		C.rb_free_host(p)
		return nil, 0, err
	}
	return unsafe.Slice((*uint32)(p), n), cu.DevicePtr(d), nil
}

func freeHostWords(w []uint32) error {
	return check("cuMemFreeHost", int(C.rb_free_host(unsafe.Pointer(&w[0]))))
}
