// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// DeviceMemory is the device memory of a ring. The broker knows nothing of GPUs. A
// worker allocates the memory, and offers a descriptor that keeps it. Every peer that
// needs the memory gets a copy of the descriptor and imports it. So the memory outlives
// the worker, and ends with the ring and its peers.
type DeviceMemory struct {
	FD  int    // -1: no worker has allocated it yet
	GPU string // UUID of its GPU, as the worker says
}

// Close may block if the descriptor is something else, so no loop calls it.
func (d *DeviceMemory) Close() {
	CloseFD(d.FD)
	*d = DeviceMemory{FD: -1}
}

// closeAside is Close for a loop.
func (d *DeviceMemory) closeAside() {
	go CloseFD(d.FD)
	*d = DeviceMemory{FD: -1}
}

// ErrNeedsDevice asks a worker to allocate the ring's device memory.
var ErrNeedsDevice = errors.New("the ring has no device memory yet")

// deviceForClient is a descriptor of the ring's device memory for a client; -1 if the
// ring has no tensor in device memory. It is called on the loop.
func (r *Ring) deviceForClient(usesDevice bool) (fd int, err error) {
	first := r.layout.Signature.WithoutState().FirstOnDevice()
	switch {
	case first == nil:
		return -1, nil
	case !usesDevice:
		return -1, fmt.Errorf("%w: %s of %q lies in device memory, which this client does not use; "+
			"C programs say that they can (rb_connect_options.device), Go programs cannot", status.ErrInvalid, first, r.name)
	case r.device.FD < 0:
		return -1, fmt.Errorf("%w: no worker has allocated the device memory of %q yet", status.ErrNoWorker, r.name)
	}
	return r.dupDevice()
}

// deviceForWorker is deviceForClient for a worker of these tensors. The ring takes the first
// worker's offer.
func (r *Ring) deviceForWorker(p *Peer, sig *tensor.Signature, offer *DeviceMemory) (fd int, err error) {
	if sig.FirstOnDevice() == nil {
		return -1, nil
	}
	if r.device.FD < 0 {
		if offer.FD < 0 {
			return -1, ErrNeedsDevice
		}
		r.device, *offer = *offer, DeviceMemory{FD: -1}
		r.log.Info("device memory allocated", "worker", p.Name, "gpu", r.device.GPU, "bytes", r.layout.DeviceSize)
	}
	return r.dupDevice()
}

func (r *Ring) dupDevice() (fd int, err error) {
	if fd = Dup(r.device.FD); fd < 0 {
		return -1, ErrDescriptors
	}
	return fd, nil
}

// dropUnusedDevice gives the device memory back after the last peer, on the loop.
func (r *Ring) dropUnusedDevice() {
	if r.device.FD < 0 || len(r.clients) > 0 {
		return
	}
	for _, s := range r.stages {
		if s.present > 0 {
			return
		}
	}
	r.log.Info("device memory given back: no peer is attached", "bytes", r.layout.DeviceSize)
	r.device.closeAside()
}

// LoseDevices gives up lost device memory, and disconnects the clients that have it mapped.
func (l *Loop) LoseDevices() {
	l.Do(func() {
		for r := range l.rings {
			if r.device.FD < 0 {
				continue
			}
			for c := range r.clients {
				r.clientLeft(c, "the model's device memory was lost")
			}
			if r.device.FD >= 0 { // a worker that is being killed is still attached
				r.device.closeAside()
			}
		}
	})
}

// CheckPrivate refuses private slots in device memory, which the broker cannot clear.
func CheckPrivate(settings *policy.Settings, deviceSize int64) error {
	if settings.Private && deviceSize > 0 {
		return fmt.Errorf("%w: private: slots in device memory cannot be cleared between clients; "+
			"have all tensors on the host, or do without", status.ErrInvalid)
	}
	return nil
}
