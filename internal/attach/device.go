// SPDX-License-Identifier: Apache-2.0

package attach

import (
	"context"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// offer allocates the device memory that a ring needs, and attaches again with it.
// If there is not enough of it, another worker may have been quicker, so that it
// is there by now.
func offer(ctx context.Context, c *net.UnixConn, device shm.Device, req *control.Request, need *control.DeviceNeed) (*control.Reply, []int, error) {
	if device == nil {
		return nil, nil, errNoDevice
	}
	again := *req
	fd, gpu, err := device.Allocate(need.Bytes, need.Device)
	if err != nil && !errors.Is(err, status.ErrNoMemory) {
		return nil, nil, err
	}
	var with []int
	if err == nil {
		defer unix.Close(fd)
		with, again.GPU = []int{fd}, gpu
	}
	rep, fds, callErr := Call(ctx, c, &again, with...)
	if callErr == nil && rep.Needs != nil {
		control.CloseFDs(fds)
		if err == nil {
			err = fmt.Errorf("%w: the broker did not take the device memory", status.ErrProtocol)
		}
		return nil, nil, err
	}
	return rep, fds, callErr
}

var errNoDevice = fmt.Errorf("%w: the model has tensors in device memory, and this program was built without CUDA", status.ErrNoGPU)

// openDevice imports the device memory, if tensors of this peer lie there. It
// takes the descriptors.
func (s *Session) openDevice(device shm.Device, sig tensor.Signature, fds *[]int) error {
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
