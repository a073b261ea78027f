// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Device is the memory of a GPU that peers share by descriptors. Package worker/cuda
// has it, if it is built with CUDA.
type Device interface {
	// Allocate allocates memory on the GPU of that number and exports it. The caller
	// closes the descriptor, which keeps the memory.
	Allocate(bytes int64, number int) (fd int, gpu string, err error)
	// Import maps exported memory on the GPU with that UUID into this process. The
	// caller closes the descriptor.
	Import(fd int, bytes int64, gpu string) error
	// Synchronize waits until the GPU has finished all work of this process.
	Synchronize()
	// Close unmaps the memory.
	Close()
}

// OpenWith is Open for a peer with a GPU. The session takes ownership of device. If the
// ring has no device memory yet, OpenWith allocates it and attaches with it. If the GPU
// has not enough memory left, another worker may have allocated the ring's meanwhile.
func OpenWith(ctx context.Context, socket string, device Device, req *control.Request) (*Session, error) {
	a := attacher{socket, device}
	s, need, err := a.attach(ctx, req, -1)
	if err != nil || need == nil {
		return s, err
	}
	if device == nil {
		return nil, errNoDevice
	}
	fd, gpu, lacking := device.Allocate(need.Bytes, need.Device)
	if lacking != nil && !errors.Is(lacking, status.ErrNoMemory) {
		return nil, lacking
	}
	again, offer := *req, -1
	if lacking == nil {
		defer unix.Close(fd)
		again.GPU, offer = gpu, fd
	}
	s, need, err = a.attach(ctx, &again, offer)
	switch {
	case err != nil || need == nil:
		return s, err
	case lacking != nil:
		return nil, lacking
	}
	return nil, fmt.Errorf("%w: the broker did not take the device memory", status.ErrProtocol)
}

var errNoDevice = fmt.Errorf("%w: the model has tensors in device memory, and this program was built without CUDA", status.ErrNoGPU)

// openDevice imports the device memory if tensors of this peer are there.
func (s *Session) openDevice(device Device, sig *tensor.Signature, fds *[]int) error {
	first := sig.FirstOnDevice()
	if (first != nil) != (s.Info.DeviceSize != 0) || first != nil && s.Info.DeviceSize != s.Layout.DeviceSize {
		return fmt.Errorf("%w: %d bytes of device memory, expected %d", status.ErrLayout, s.Info.DeviceSize, s.Layout.DeviceSize)
	}
	if first == nil {
		return nil
	}
	if device == nil {
		return errNoDevice
	}
	if err := device.Import((*fds)[0], s.Info.DeviceSize, s.Info.GPU); err != nil {
		return fmt.Errorf("attach %s: %w", s.Info.Model, err)
	}
	s.Device = device
	return nil
}
