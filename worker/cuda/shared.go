// SPDX-License-Identifier: Apache-2.0

//go:build cuda

package cuda

// Device memory that processes share: CUDA's virtual memory API, with POSIX
// descriptors as shareable handles. cbindings/src/device.c does the same.

/*
#include <cuda.h>
#include <string.h>

static int rb_create(CUmemGenericAllocationHandle *h, size_t n, CUdevice dev) {
	CUmemAllocationProp p = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev},
	};
	return cuMemCreate(h, n, &p, 0);
}

static int rb_export(int *fd, CUmemGenericAllocationHandle h) {
	return cuMemExportToShareableHandle(fd, h, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static int rb_import(CUmemGenericAllocationHandle *h, int fd) {
	return cuMemImportFromShareableHandle(h, (void *)(size_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static int rb_map(CUdeviceptr *at, size_t n, CUmemGenericAllocationHandle h, CUdevice dev) {
	CUmemAccessDesc all = {
		.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev},
		.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
	};
	int r = cuMemAddressReserve(at, n, 0, 0, 0);
	if (r) return r;
	if (!(r = cuMemMap(*at, n, 0, h, 0))) {
		if (!(r = cuMemSetAccess(*at, n, &all, 1))) return r;
		cuMemUnmap(*at, n);
	}
	cuMemAddressFree(*at, n);
	return r;
}

static void rb_unmap(CUdeviceptr at, size_t n) {
	cuMemUnmap(at, n);
	cuMemAddressFree(at, n);
}

static int rb_clear(CUdeviceptr at, size_t n) {
	int r = cuMemsetD8(at, 0, n);
	return r ? r : cuCtxSynchronize();
}

static int rb_uuid(unsigned char *to, CUdevice dev) {
	CUuuid u;
	int r = cuDeviceGetUuid_v2(&u, dev);
	memcpy(to, u.bytes, 16);
	return r;
}
*/
import "C"

import (
	"errors"
	"fmt"

	"gorgonia.org/cu"

	"github.com/ringbatch/ringbatch/status"
)

// sharedMemory is the device memory of a ring on the worker's GPU; an attach.Device.
// It is used on the thread that has the device's context.
type sharedMemory struct {
	d    *device
	base cu.DevicePtr // 0: not mapped
	size int64
}

// uuidOf is a GPU's UUID as nvidia-smi prints it.
func uuidOf(dev cu.Device) (string, error) {
	var u [16]byte
	if err := check("cuDeviceGetUuid", int(C.rb_uuid((*C.uchar)(&u[0]), C.CUdevice(dev)))); err != nil {
		return "", err
	}
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]), nil
}

// refused gives an error of the driver the name that peers in every language know.
func refused(what string, bytes int64, err error) error {
	var e *Error
	if errors.As(err, &e) && e.Code == int(cu.OutOfMemory) {
		return fmt.Errorf("%w: %s %d MiB of device memory; lower the model's slots: %w", status.ErrNoMemory, what, bytes>>20, err)
	}
	return fmt.Errorf("%w: %s %d bytes of device memory: %w", status.ErrLayout, what, bytes, err)
}

// Allocate makes cleared memory: it may have held another program's data.
func (m *sharedMemory) Allocate(bytes int64, number int) (fd int, gpu string, err error) {
	n, err := cu.NumDevices()
	if err != nil {
		return -1, "", checked("cuDeviceGetCount", err)
	}
	if number >= n {
		return -1, "", fmt.Errorf("%w: device:%d is to hold it, and this worker sees %d", status.ErrWrongGPU, number, n)
	}
	dev, err := cu.GetDevice(number)
	if err != nil {
		return -1, "", checked("cuDeviceGet", err)
	}
	if gpu, err = uuidOf(dev); err != nil {
		return -1, "", err
	}
	var handle C.CUmemGenericAllocationHandle
	if err := check("cuMemCreate", int(C.rb_create(&handle, C.size_t(bytes), C.CUdevice(dev)))); err != nil {
		return -1, "", refused("allocating", bytes, err)
	}
	defer C.cuMemRelease(handle) // the descriptor keeps the memory
	if dev == m.d.dev {
		var at C.CUdeviceptr
		if err = check("cuMemMap", int(C.rb_map(&at, C.size_t(bytes), handle, C.CUdevice(dev)))); err == nil {
			err = check("cuMemsetD8", int(C.rb_clear(at, C.size_t(bytes))))
			C.rb_unmap(at, C.size_t(bytes))
		}
	}
	var exported C.int
	if err == nil {
		err = check("cuMemExportToShareableHandle", int(C.rb_export(&exported, handle)))
	}
	if err != nil {
		return -1, "", refused("allocating", bytes, err)
	}
	return int(exported), gpu, nil
}

// Import maps the memory. It refuses memory of another GPU than the worker's:
// a model runs on the GPU of its tensors.
func (m *sharedMemory) Import(fd int, bytes int64, gpu string) error {
	own, err := uuidOf(m.d.dev)
	if err != nil {
		return err
	}
	if own != gpu {
		return fmt.Errorf("%w: it is on %s, this worker runs on %s", status.ErrWrongGPU, gpu, own)
	}
	var handle C.CUmemGenericAllocationHandle
	var at C.CUdeviceptr
	err = check("cuMemImportFromShareableHandle", int(C.rb_import(&handle, C.int(fd))))
	if err == nil {
		err = check("cuMemMap", int(C.rb_map(&at, C.size_t(bytes), handle, C.CUdevice(m.d.dev))))
		C.cuMemRelease(handle) // the mapping keeps the memory
	}
	if err != nil {
		return refused("importing", bytes, err)
	}
	m.base, m.size = cu.DevicePtr(at), bytes
	return nil
}

// Synchronize waits until the context has done its work, or has failed.
func (m *sharedMemory) Synchronize() { C.cuCtxSynchronize() }

// Close unmaps the memory, after the worker's streams are done.
func (m *sharedMemory) Close() {
	if m.base != 0 {
		C.rb_unmap(C.CUdeviceptr(m.base), C.size_t(m.size))
	}
	m.base = 0
}
