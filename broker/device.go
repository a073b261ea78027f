// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// deviceMemory is the device memory of a ring as far as the broker has to do
// with it. It knows nothing of GPUs: a worker allocates, and offers a descriptor
// that keeps the memory; every peer that needs it gets a copy and imports it. So
// the memory outlives the worker, and is gone when the ring and its peers are.
type deviceMemory struct {
	fd  int    // -1: no worker has allocated it yet
	gpu string // UUID of the GPU that it is on, as the worker says
}

// close is for connections. The last close of a descriptor gives device memory
// back, and of one that only pretends to be that it may block.
func (d *deviceMemory) close() {
	closeFD(d.fd)
	*d = deviceMemory{fd: -1}
}

// closeAside is close for a loop, which never waits for a descriptor.
func (d *deviceMemory) closeAside() {
	go closeFD(d.fd)
	*d = deviceMemory{fd: -1}
}

// maxGPUBytes is longer than any UUID.
const maxGPUBytes = 47

// receiveOffer takes the device memory that a worker announces, if it does. What it
// really is the broker cannot know: who imports it finds out.
func receiveOffer(c *net.UnixConn, req *control.Request) (offer deviceMemory, err error) {
	if offer.fd = -1; req.Op != control.OpWorker || req.GPU == "" {
		return offer, nil
	}
	if !tensor.ValidName(req.GPU) || len(req.GPU) > maxGPUBytes {
		return offer, fmt.Errorf("%w: device memory on the GPU %q: want its UUID", status.ErrInvalid, req.GPU)
	}
	if offer.fd, err = control.ReceiveOffer(c, time.Now().Add(helloTime)); err != nil {
		return offer, fmt.Errorf("%w: device memory: %w", status.ErrProtocol, err)
	}
	if !mayBeDevice(offer.fd) {
		offer.close()
		return offer, fmt.Errorf("%w: the descriptor that was offered is no device memory", status.ErrInvalid)
	}
	offer.gpu = req.GPU
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

// errNeedsDevice tells a worker to allocate the ring's device memory.
var errNeedsDevice = errors.New("the ring has no device memory yet")

// takeDevice has the ring's device memory ready for a peer whose tensors these
// are, and gives it a descriptor: -1 if none of them lies there. The first
// worker's offer is taken. On the ring's loop.
func (r *ring) takeDevice(sig *tensor.Signature, req *control.Request, offer *deviceMemory) (fd int, err error) {
	first := sig.FirstOnDevice()
	if first == nil {
		return -1, nil
	}
	if req.Op == control.OpClient && !req.Device {
		return -1, fmt.Errorf("%w: %s of %q lies in device memory, which this client does not use; C programs say that they can (rb_connect_options.device), Go programs cannot", status.ErrInvalid, first, req.Model)
	}
	if r.device.fd < 0 {
		switch {
		case req.Op == control.OpClient:
			return -1, fmt.Errorf("%w: no worker has allocated the device memory of %q yet", status.ErrNoWorker, req.Model)
		case offer.fd < 0:
			return -1, errNeedsDevice
		}
		r.device, *offer = *offer, deviceMemory{fd: -1}
		r.log.Info("device memory allocated", "worker", req.Name, "gpu", r.device.gpu, "bytes", r.layout.DeviceSize)
	}
	if fd = dup(r.device.fd); fd < 0 {
		return -1, errDescriptors
	}
	return fd, nil
}

// dropUnusedDevice gives the device memory back when no peer is left: a model
// that nobody runs or asks takes none. On the ring's loop.
func (r *ring) dropUnusedDevice() {
	if r.device.fd < 0 || len(r.clients) > 0 {
		return
	}
	for _, s := range r.stages {
		if s.present > 0 {
			return
		}
	}
	r.log.Info("device memory given back: nobody is attached", "bytes", r.layout.DeviceSize)
	r.device.closeAside()
}

// loseDevice gives up device memory whose contents are lost. On the ring's loop.
func (r *ring) loseDevice() {
	if r.device.fd < 0 {
		return
	}
	for c := range r.clients {
		r.clientLeft(c, "the model's device memory was lost")
	}
	if r.device.fd >= 0 { // a worker that is being killed is still there
		r.device.closeAside()
	}
}

// need is what a worker is asked for.
func (r *ring) need(sig *tensor.Signature) *control.DeviceNeed {
	return &control.DeviceNeed{Bytes: r.layout.DeviceSize, Device: sig.FirstOnDevice().Device()}
}

// checkPrivate refuses a promise that the broker cannot keep: it cannot clear
// memory that it cannot touch.
func checkPrivate(settings *policy.Settings, deviceSize int64) error {
	if settings.Private && deviceSize > 0 {
		return fmt.Errorf("%w: private: slots in device memory cannot be cleared between clients; have all tensors on the host, or do without", status.ErrInvalid)
	}
	return nil
}
