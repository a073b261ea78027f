// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// How sessions begin and end, for package broker.

// Shared is the memory that a peer gets when it attaches.
type Shared struct {
	// FDs are descriptors of the planes, the board, the session, the doorbell, and
	// of the device memory if HasDevice. The caller sends and closes them.
	FDs         []int
	SessionSize int64
	HasDevice   bool
	GPU         string // UUID of the device memory's GPU
}

func (f *Shared) close() {
	for _, fd := range f.FDs {
		CloseFD(fd)
	}
	f.FDs = nil
}

// ClientInfo is how a client describes itself.
type ClientInfo struct {
	Window int  // slots; 0: as many as fit
	Times  bool // it writes when it asked, claimed and woke, for the recorder
	Device bool // it can use device memory
}

// AttachClient begins the session of a client. It is called away from the loop, and so
// are the steps whose cost grows with the window. On an error the caller keeps the peer.
func (r *Ring) AttachClient(p *Peer, info ClientInfo) (c *ClientSession, f Shared, err error) {
	if err := r.openClient(p, info.Window, info.Times); err != nil {
		return nil, f, err
	}
	books := newBooks(info.Window)
	if !r.loop.Do(func() { c, err = r.reserveWindow(p, info.Window, books) }) {
		err = status.ErrDraining
	}
	if err != nil {
		return nil, f, err
	}
	c.resetWindow()
	if !r.loop.Do(func() {
		if f, err = r.beginClient(c, info.Times, info.Device); err != nil {
			r.takeBackWindow(c)
		}
	}) {
		err = status.ErrDraining
	}
	return c, f, err
}

// beginClient is the last part of AttachClient, on the loop.
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

// AttachWorker begins the session of a worker whose signature was checked. It is called
// away from the loop. On an error the caller keeps the peer.
func (s *Stage) AttachWorker(p *Peer, info WorkerInfo, offer *DeviceMemory) (w *WorkerSession, f Shared, err error) {
	if err := s.openWorker(p, &info); err != nil {
		return nil, f, err
	}
	for end := time.Now().Add(leavingTime); ; time.Sleep(leavingPoll) {
		if !s.loop.Do(func() { w, f, err = s.beginWorker(p, info, offer) }) {
			err = status.ErrDraining
		}
		if !errors.Is(err, ErrOtherProgram) || time.Now().After(end) {
			return w, f, err
		}
	}
}

// A worker of another program may just be leaving: on a busy machine the loop learns that late.
const (
	leavingTime = time.Second
	leavingPoll = 20 * time.Millisecond
)

func (s *Stage) beginWorker(p *Peer, info WorkerInfo, offer *DeviceMemory) (w *WorkerSession, f Shared, err error) {
	if err := s.checkProgram(&info); err != nil {
		return nil, f, err
	}
	device, err := s.ring.deviceForWorker(p, &s.layout.Signature, offer)
	if err != nil {
		return nil, f, err
	}
	if f, err = s.ring.shareMemory(s.ring.bseg.FD(), device); err != nil {
		return nil, f, err
	}
	if s.settings.Ragged && !info.Ragged {
		err = fmt.Errorf("%w: %q is ragged: its batches mix sizes, and this worker did not ask for that (ragged)",
			status.ErrInvalid, s.name)
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

// shareMemory makes descriptors of the ring's memory for a peer. It takes the device
// memory's descriptor over, which may be -1.
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

// addSession adds the peer's own descriptors. The device memory's stays the last.
func (f *Shared) addSession(p *Peer) {
	f.SessionSize = p.seg.Size()
	session, doorbell := p.takeFDs()
	f.FDs = append(f.FDs[:2:2], append([]int{session, doorbell}, f.FDs[2:]...)...)
}

// Window is the client's first slot, number of slots, and the generation before its first.
func (c *ClientSession) Window() (first uint32, slots int, generation uint32) {
	return c.first, c.window, c.before
}

// Leave ends the session of a client, if it has not ended yet. No loop calls it.
func (c *ClientSession) Leave(why string) {
	c.ring.Do(func() { c.ring.clientLeft(c, why) })
}

// Leave ends the session of a worker whose connection has ended. No loop calls it.
func (w *WorkerSession) Leave(why string) {
	w.stage.ring.Do(func() { w.stage.workerLost(w, why) })
}

// ID is the worker's place in its stage.
func (w *WorkerSession) ID() uint32 { return uint32(w.id) }

// HandsOn says that another stage gets the requests that this stage's workers ran.
func (s *Stage) HandsOn() bool { return s.next != nil }

// MaxRows is the most rows of a request that all stages take; 0: a whole batch.
func (r *Ring) MaxRows() (rows int) {
	for _, s := range r.stages {
		if s.most < r.layout.MaxBatch && (rows == 0 || s.most < rows) {
			rows = s.most
		}
	}
	return rows
}
