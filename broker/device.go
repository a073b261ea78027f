// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// maxGPUBytes is longer than any UUID.
const maxGPUBytes = 47

// receiveOffer takes the device memory that a worker announces, if it does. What it
// really is the broker cannot know: who imports it finds out.
func receiveOffer(c *net.UnixConn, req *control.Request) (offer engine.DeviceMemory, err error) {
	if offer.FD = -1; req.Op != control.OpWorker || req.GPU == "" {
		return offer, nil
	}
	if !tensor.ValidName(req.GPU) || len(req.GPU) > maxGPUBytes {
		return offer, fmt.Errorf("%w: device memory on the GPU %q: want its UUID", status.ErrInvalid, req.GPU)
	}
	if offer.FD, err = control.ReceiveOffer(c, time.Now().Add(helloTime)); err != nil {
		return offer, fmt.Errorf("%w: device memory: %w", status.ErrProtocol, err)
	}
	if !mayBeDevice(offer.FD) {
		offer.Close()
		return offer, fmt.Errorf("%w: the descriptor that was offered is no device memory", status.ErrInvalid)
	}
	offer.GPU = req.GPU
	return offer, nil
}

// mayBeDevice tells what a driver exports, an open device, from files and sockets.
// A memfd passes: that is what a driver without a GPU has (hack/cuda/stub).
func mayBeDevice(fd int) bool {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false
	}
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	return st.Mode&unix.S_IFMT == unix.S_IFCHR || err == nil
}
