// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// weights are the weights segments, by model. A segment stays until the broker ends: a
// worker that is restarted finds the weights that were published last. The broker hands
// out the memory, and clears the words of peers that have gone. It never waits, and no
// batch passes through here.
type weights struct {
	mu     sync.Mutex
	models map[string]*modelWeights
}

type modelWeights struct {
	*shm.Weights
	model     string
	device    engine.DeviceMemory // with the buffers, if the tensors are there
	uid       int                 // the user that it counts for
	publisher *weightsPeer
	followers [shm.WeightFollowers]*weightsPeer
}

type weightsPeer struct {
	pid  int
	name string
	conn *net.UnixConn
}

// serveWeights serves a publisher or a follower until it hangs up or its process ends.
func (b *conversation) serveWeights(req *control.Request) {
	if b.noPidfd != nil {
		b.refuse(b.noPidfd)
		return
	}
	offer, err := receiveOffer(b.conn, req)
	if err != nil {
		b.refuse(err)
		return
	}
	defer offer.Close() // unless the weights take it
	rep, peer := b.reply(), &weightsPeer{int(b.cred.Pid), req.Name, b.conn}
	m, fds, err := b.weights.attach(b.Broker, int(b.cred.Uid), peer, req, &offer, rep)
	switch {
	case errors.Is(err, engine.ErrNeedsDevice):
		b.send(rep)
		return
	case err != nil:
		b.refuse(err)
		return
	}
	err = control.Send(b.conn, time.Now().Add(replyTime), rep, fds...)
	control.CloseFDs(fds)
	var one [1]byte
	for err == nil && !hasEnded(b.pidfd) { // a child of the peer may keep the connection
		_ = b.conn.SetReadDeadline(time.Now().Add(weightsLook))
		if _, err = b.conn.Read(one[:]); errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
	}
	if !errors.Is(err, net.ErrClosed) { // when this broker ends, a batch of the peer may still read its buffer
		b.weights.detach(m, rep.Weights.Follower)
	}
}

// weightsLook is how long the death of a peer may go unnoticed if a child has its connection.
const weightsLook = 500 * time.Millisecond

// attach finds or makes the segment, enters the peer, and sets rep.Weights. With
// ErrNeedsDevice it sets rep.Needs. The caller closes the descriptors.
func (w *weights) attach(b *Broker, uid int, peer *weightsPeer, req *control.Request, offer *engine.DeviceMemory, rep *control.Reply) (
	m *modelWeights, fds []int, err error) {
	if !tensor.ValidName(req.Model) || req.Weights == nil {
		return nil, nil, fmt.Errorf("%w: weights of the model %q", status.ErrInvalid, req.Model)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	follower := -1
	if req.Weights.Publish {
		m, err = w.forPublisher(b, uid, req, offer, rep)
	} else {
		m, follower, err = w.forFollower(req)
	}
	if err != nil {
		return nil, nil, err
	}
	if fds, err = m.descriptors(); err != nil {
		return nil, nil, err
	}
	if follower < 0 {
		m.publisher = peer
	} else {
		m.followers[follower] = peer
	}
	rep.Weights = &control.Weights{Tensors: tensor.SpecTexts(m.Tensors), Follower: follower, GPU: m.device.GPU}
	return m, fds, nil
}

func (w *weights) forFollower(req *control.Request) (m *modelWeights, free int, err error) {
	if m = w.models[req.Model]; m == nil {
		return nil, 0, fmt.Errorf("%w: %q has no weights yet: nothing was published", status.ErrUnknownModel, req.Model)
	}
	if m.DeviceSize > 0 && !req.Device {
		return nil, 0, fmt.Errorf("%w: the weights of %q lie in device memory, which this worker does not use; "+
			"C programs say that they can (rb_connect_options.device), Go programs cannot", status.ErrInvalid, req.Model)
	}
	if free = slices.Index(m.followers[:], nil); free < 0 {
		return nil, 0, fmt.Errorf("%w: %d workers follow the weights of %q", status.ErrQuota, shm.WeightFollowers, req.Model)
	}
	return m, free, nil
}

// forPublisher is the segment of these tensors. While no worker follows, a publisher may
// replace a segment by another one.
func (w *weights) forPublisher(b *Broker, uid int, req *control.Request, offer *engine.DeviceMemory, rep *control.Reply) (*modelWeights, error) {
	if b.models.isAlias(req.Model) {
		return nil, fmt.Errorf("%w: %q is an alias, and workers follow the weights of their model: publish those", status.ErrInvalid, req.Model)
	}
	tensors, err := tensor.ParseSpecs(req.Weights.Tensors, nil)
	if err != nil {
		return nil, err
	}
	layout, err := shm.NewWeightsLayout(tensors)
	if err != nil {
		return nil, err
	}
	m := w.models[req.Model]
	switch {
	case m != nil && m.publisher != nil:
		return nil, fmt.Errorf("%w: process %d publishes the weights of %q already", status.ErrBusy, m.publisher.pid, req.Model)
	case m != nil && m.Geometry == layout.Geometry:
		return m, nil
	case m != nil && slices.ContainsFunc(m.followers[:], func(p *weightsPeer) bool { return p != nil }):
		return nil, fmt.Errorf("%w: workers follow weights of %q that differ: %s; end them, or publish under another name",
			status.ErrSignatureMismatch, req.Model, firstDifference(m.Tensors, layout.Tensors))
	case layout.DeviceSize > 0 && offer.FD < 0:
		rep.Needs = &control.DeviceNeed{Bytes: layout.DeviceSize, Device: tensors[0].Device()}
		return nil, engine.ErrNeedsDevice
	}
	if err := shm.CheckRoom(layout.Size); err != nil {
		return nil, fmt.Errorf("weights of %q: %w", req.Model, err)
	}
	if err := b.users.countModel(uid, 0, layout.Size+layout.DeviceSize); err != nil {
		return nil, fmt.Errorf("weights of %q: %w", req.Model, err)
	}
	segment, err := shm.CreateWeights(b.cfg.Memory, layout, b.epoch)
	if err != nil {
		b.users.uncountModel(uid, 0, layout.Size+layout.DeviceSize)
		return nil, err
	}
	if m != nil {
		segment.Continue(m.Weights)
		w.forget(b, m)
	}
	m = &modelWeights{Weights: segment, model: req.Model, uid: uid, device: engine.DeviceMemory{FD: -1}}
	if layout.DeviceSize > 0 {
		m.device, *offer = *offer, m.device
	}
	w.models[req.Model] = m
	return m, nil
}

// descriptors are copies for a peer: of the segment, and of the device memory.
func (m *modelWeights) descriptors() (fds []int, err error) {
	for _, fd := range []int{m.Segment().FD(), m.device.FD} {
		if fd < 0 {
			continue
		}
		if fd = engine.Dup(fd); fd < 0 {
			control.CloseFDs(fds)
			return nil, engine.ErrDescriptors
		}
		fds = append(fds, fd)
	}
	return fds, nil
}

// forget gives back the memory of weights that no peer uses, or whose device memory was lost.
func (w *weights) forget(b *Broker, m *modelWeights) {
	m.Segment().Close()
	m.device.Close()
	b.users.uncountModel(m.uid, 0, m.Size+m.DeviceSize)
	delete(w.models, m.model)
}

// dropDevices gives the device memory back after it was lost, and disconnects its peers.
func (w *weights) dropDevices(b *Broker) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.models {
		if m.DeviceSize == 0 {
			continue
		}
		for _, p := range append(m.followers[:], m.publisher) {
			if p != nil {
				_ = p.conn.Close()
			}
		}
		w.forget(b, m)
	}
}

func firstDifference(has, wants []tensor.Spec) string {
	for i := range max(len(has), len(wants)) {
		switch {
		case i >= len(has):
			return fmt.Sprintf("they have no %s", wants[i])
		case i >= len(wants):
			return fmt.Sprintf("they have %s", has[i])
		case has[i].String() != wants[i].String():
			return fmt.Sprintf("%s there, %s here", has[i], wants[i])
		}
	}
	return "their order"
}

func (w *weights) detach(m *modelWeights, follower int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.models[m.model] != m {
		return // its memory was given back
	}
	if follower < 0 {
		m.publisher = nil
		return
	}
	m.followers[follower] = nil
	m.ForgetFollower(follower)
}

// withdraw refuses a version for an administrator.
func (w *weights) withdraw(model string, version shm.Version) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.models[model]
	if m == nil {
		return fmt.Errorf("%w: %q has no weights", status.ErrUnknownModel, model)
	}
	if m.Last() == 0 {
		return fmt.Errorf("%w: no version of the weights of %q was published yet", status.ErrInvalid, model)
	}
	if !m.Withdraw(version, "withdrawn by hand") {
		now, _ := m.InForce()
		return fmt.Errorf("%w: version %d is not the latest of %q, or was withdrawn before; %d is in force",
			status.ErrInvalid, version, model, now)
	}
	return nil
}

func (w *weights) snapshot() (list []stats.Weights) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for name, m := range w.models {
		v, published := m.InForce()
		s := stats.Weights{Model: name, Version: uint32(v), Last: uint32(m.Last()), Tensors: len(m.Tensors), Bytes: m.Size + m.DeviceSize}
		if v > 0 {
			s.AgeS = time.Duration(shm.Now() - published).Seconds()
		}
		if refused, reason := m.Refused(); refused > 0 {
			s.Withdrawn, s.Reason = uint32(refused), reason
		}
		if m.publisher != nil {
			s.Publisher = m.publisher.pid
		}
		for i, f := range m.followers {
			if f != nil {
				s.Followers = append(s.Followers, stats.Follower{Pid: f.pid, Name: f.name, Version: uint32(m.Loaded(i))})
			}
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(x, y stats.Weights) int { return strings.Compare(x.Model, y.Model) })
	return list
}

func (w *weights) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.models {
		m.Segment().Close()
		m.device.Close()
	}
	w.models = nil
}
