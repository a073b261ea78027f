// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Shared is the memory that a peer gets when it attaches.
type Shared struct {
	// FDs are descriptors of the planes, the board, the session, the doorbell, and
	// of the device memory if HasDevice. The caller closes them once they were sent.
	FDs         []int
	SessionSize int64
	HasDevice   bool
	GPU         string // UUID of the GPU that the device memory is on
}

func (f *Shared) close() {
	for _, fd := range f.FDs {
		CloseFD(fd)
	}
	f.FDs = nil
}

// Reserve gets a client whose session is open its window, with its slots made new. It
// is called away from the loop.
func (r *Ring) Reserve(p *Peer, window int) (c *ClientSession, err error) {
	books := newBooks(window)
	if !r.loop.Do(func() { c, err = r.reserveWindow(p, window, books) }) {
		err = status.ErrDraining
	}
	if err == nil {
		c.resetWindow()
	}
	return c, err
}

// AttachClient lets a client that has its window commit. It is called away from the
// loop. On an error the window is given back; the session is still the caller's.
func (r *Ring) AttachClient(c *ClientSession, tellsTimes, usesDevice bool) (f Shared, err error) {
	if !r.loop.Do(func() {
		if f, err = r.beginClient(c, tellsTimes, usesDevice); err != nil {
			r.takeBackWindow(c)
		}
	}) {
		err = status.ErrDraining
	}
	return f, err
}

// beginClient is AttachClient's part on the loop.
func (r *Ring) beginClient(c *ClientSession, tellsTimes, usesDevice bool) (f Shared, err error) {
	if r.loop.draining {
		return f, status.ErrDraining
	}
	device, err := r.deviceForClient(usesDevice)
	if err != nil {
		return f, err
	}
	if f, err = r.shareMemory(r.boardRO, device); err != nil {
		return f, err
	}
	if tellsTimes {
		c.times = shm.NewClientTimes(c.seg, c.window)
	}
	if err := r.attachClient(c); err != nil {
		f.close()
		return f, err
	}
	f.addSession(c.Peer)
	return f, nil
}

// AttachWorker lets a worker whose session is open get batches. It is called away from
// the loop. On an error the session is still the caller's.
func (s *Stage) AttachWorker(p *Peer, info WorkerInfo, offer *DeviceMemory) (w *WorkerSession, f Shared, err error) {
	if !s.loop.Do(func() { w, f, err = s.beginWorker(p, info, offer) }) {
		err = status.ErrDraining
	}
	return w, f, err
}

// beginWorker is AttachWorker's part on the loop.
func (s *Stage) beginWorker(p *Peer, info WorkerInfo, offer *DeviceMemory) (w *WorkerSession, f Shared, err error) {
	device, err := s.ring.deviceForWorker(p, &s.layout.Signature, offer)
	if err != nil {
		return nil, f, err
	}
	if f, err = s.ring.shareMemory(s.ring.bseg.FD(), device); err != nil {
		return nil, f, err
	}
	if s.settings.Ragged && !info.Ragged {
		err = fmt.Errorf("%w: %q is ragged: its batches mix sizes, and this worker did not ask for that (ragged)", status.ErrInvalid, s.name)
	} else {
		w, err = s.attachWorker(p, info)
	}
	if err != nil {
		f.close()
		return nil, f, err
	}
	f.addSession(p)
	return w, f, nil
}

// shareMemory makes descriptors of the ring's memory for a peer. It takes over that of
// the device memory, which may be -1.
func (r *Ring) shareMemory(board, device int) (f Shared, err error) {
	f = Shared{FDs: []int{Dup(r.planes.FD()), Dup(board)}}
	if f.FDs[0] < 0 || f.FDs[1] < 0 {
		f.close()
		CloseFD(device)
		return f, ErrDescriptors
	}
	if device >= 0 {
		f.HasDevice, f.GPU = true, r.device.GPU
		f.FDs = append(f.FDs, device)
	}
	return f, nil
}

// addSession adds the peer's own descriptors. That of the device memory stays the last.
func (f *Shared) addSession(p *Peer) {
	f.SessionSize = p.seg.Size()
	session, doorbell := p.takeFDs()
	f.FDs = append(f.FDs[:2:2], append([]int{session, doorbell}, f.FDs[2:]...)...)
}

// Window is the client's slots: the first one, how many, and the generation before
// the client's first.
func (c *ClientSession) Window() (first uint32, slots int, generation uint32) {
	return c.first, c.window, c.firstGen()
}

// Leave ends the session of a client, if it has not ended yet. Any goroutine but the
// loop's may call it.
func (c *ClientSession) Leave(why string) {
	c.ring.Do(func() { c.ring.clientLeft(c, why) })
}

// Leave ends the session of a worker whose connection has ended. Any goroutine but the
// loop's may call it.
func (w *WorkerSession) Leave(why string) {
	w.stage.ring.Do(func() { w.stage.workerLost(w, why) })
}

// ID is the worker's place in its stage.
func (w *WorkerSession) ID() uint32 { return uint32(w.id) }

// HandsOn says that another stage gets the requests that this stage's workers ran.
func (s *Stage) HandsOn() bool { return s.next != nil }

// MaxRows is the most rows of a request that all stages take; 0: as many as a batch has.
func (r *Ring) MaxRows() (rows int) {
	for _, s := range r.stages {
		if s.most < r.layout.MaxBatch && (rows == 0 || s.most < rows) {
			rows = s.most
		}
	}
	return rows
}
