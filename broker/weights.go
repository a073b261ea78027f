// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"maps"
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

// weights are the weights segments, by model. A segment stays until its model and its peers
// are gone: a worker that is restarted finds the weights that were published last. The
// broker hands out the memory, and clears the words of peers that have gone. It never
// waits, and no batch passes through here.
type weights struct {
	mu      sync.Mutex
	models  map[string]*modelWeights
	waiting map[string][]*weightsPeer // followers of models that have none yet
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
	*conversation
	req *control.Request
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
	rep, peer := b.reply(), &weightsPeer{b, req}
	switch err := b.weights.attach(peer, &offer, rep); {
	case errors.Is(err, engine.ErrNeedsDevice):
		b.send(rep)
		return
	case err != nil:
		b.refuse(err)
		return
	}
	var one [1]byte
	for err == nil && !hasEnded(b.pidfd) { // a child of the peer may keep the connection
		_ = b.conn.SetReadDeadline(time.Now().Add(weightsLook))
		if _, err = b.conn.Read(one[:]); errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
	}
	if b.closing.Err() == nil { // when this broker ends, a batch of the peer may still read its buffer
		b.weights.detach(peer)
	}
}

// weightsLook is how long the death of a peer may go unnoticed if a child has its connection.
const weightsLook = 500 * time.Millisecond

// attach enters a peer and answers it. A follower that waits is answered when there is a
// publisher. With ErrNeedsDevice, attach sets rep.Needs.
func (w *weights) attach(p *weightsPeer, offer *engine.DeviceMemory, rep *control.Reply) error {
	name := p.req.Model
	if !tensor.ValidName(name) || p.req.Weights == nil {
		return fmt.Errorf("%w: weights of the model %q", status.ErrInvalid, name)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.models[name]
	switch {
	case p.req.Weights.Publish:
		m, err := w.forPublisher(p, offer, rep)
		if err == nil {
			err = p.answer(m, -1)
		}
		if err != nil {
			return err
		}
		m.publisher = p
		for _, f := range w.waiting[name] {
			if err := m.follow(f); err != nil {
				f.serving.Go(func() { f.refuse(err); _ = f.conn.Close() })
			}
		}
		delete(w.waiting, name)
	case m != nil:
		return m.follow(p)
	case p.req.Weights.Wait:
		w.waiting[name] = append(w.waiting[name], p)
	default:
		return fmt.Errorf("%w: %q has no weights yet: nothing was published", status.ErrUnknownModel, name)
	}
	return nil
}

// follow enters a follower and answers it.
func (m *modelWeights) follow(p *weightsPeer) error {
	free := slices.Index(m.followers[:], nil)
	switch {
	case m.DeviceSize > 0 && !p.req.Device:
		return fmt.Errorf("%w: the weights of %q lie in device memory, which this worker does not use; "+
			"C programs say that they can (rb_connect_options.device)", status.ErrInvalid, m.model)
	case free < 0:
		return fmt.Errorf("%w: %d workers follow the weights of %q", status.ErrQuota, shm.WeightFollowers, m.model)
	}
	err := p.answer(m, free)
	if err == nil {
		m.followers[free] = p
	}
	return err
}

// answer sends a peer the segment. A peer that does not take it holds up no other.
func (p *weightsPeer) answer(m *modelWeights, follower int) error {
	fds, err := m.descriptors()
	if err != nil {
		return err
	}
	rep := p.reply()
	rep.Weights = &control.Weights{Tensors: tensor.SpecTexts(m.Tensors), Follower: follower, GPU: m.device.GPU}
	p.serving.Go(func() {
		if control.Send(p.conn, time.Now().Add(replyTime), rep, fds...) != nil {
			_ = p.conn.Close()
		}
		control.CloseFDs(fds)
	})
	return nil
}

// forPublisher is the segment of these tensors. A publisher may replace a segment that
// workers do not follow, or that never had a version.
func (w *weights) forPublisher(p *weightsPeer, offer *engine.DeviceMemory, rep *control.Reply) (*modelWeights, error) {
	b, uid, name := p.Broker, int(p.cred.Uid), p.req.Model
	if b.models.isAlias(name) {
		return nil, fmt.Errorf("%w: %q is an alias, and workers follow the weights of their model: publish those", status.ErrInvalid, name)
	}
	tensors, err := tensor.ParseSpecs(p.req.Weights.Tensors, nil)
	if err != nil {
		return nil, err
	}
	layout, err := shm.NewWeightsLayout(tensors)
	if err != nil {
		return nil, err
	}
	m := w.models[name]
	switch {
	case m == nil && !p.req.Weights.Again && len(w.waiting[name]) == 0:
		if err := b.checkFollowed(name); err != nil {
			return nil, w.sayWaiting(err)
		}
	case m == nil:
	case m.publisher != nil:
		return nil, fmt.Errorf("%w: process %d publishes the weights of %q already", status.ErrBusy, m.publisher.cred.Pid, name)
	case m.Geometry == layout.Geometry:
		return m, nil
	case m.Last() > 0 && len(m.peers()) > 0:
		return nil, fmt.Errorf("%w: workers follow weights of %q that differ: %s; end them, or publish under another name",
			status.ErrSignatureMismatch, name, firstDifference(m.Tensors, layout.Tensors))
	}
	if layout.DeviceSize > 0 && offer.FD < 0 {
		rep.Needs = &control.DeviceNeed{Bytes: layout.DeviceSize, Device: tensors[0].Device()}
		return nil, engine.ErrNeedsDevice
	}
	if err := shm.CheckRoom(layout.Size); err != nil {
		return nil, fmt.Errorf("weights of %q: %w", name, err)
	}
	if err := b.users.count(uid, ofWeights, 0, layout.Size+layout.DeviceSize); err != nil {
		return nil, fmt.Errorf("weights of %q: %w", name, err)
	}
	segment, err := shm.CreateWeights(layout, b.epoch)
	if err != nil {
		b.users.uncount(uid, ofWeights, 0, layout.Size+layout.DeviceSize)
		return nil, err
	}
	if m != nil {
		segment.Continue(m.Weights)
		w.forget(b, m)
	}
	m = &modelWeights{Weights: segment, model: name, uid: uid, device: engine.DeviceMemory{FD: -1}}
	if layout.DeviceSize > 0 {
		m.device, *offer = *offer, m.device
	}
	w.models[name] = m
	return m, nil
}

// checkFollowed refuses new weights of a model whose workers do not follow, and of a model
// that is not there: most often the name has a typo.
func (b *Broker) checkFollowed(name string) error {
	m, _, err := b.models.takeStage(name)
	if err != nil {
		return fmt.Errorf("weights: no worker waits for them: %w", err)
	}
	defer b.models.leaveModel(m)
	_, stages, _ := m.ring.Readiness()
	for _, s := range stages {
		if s.Attached > 0 {
			return fmt.Errorf("%w: the workers of %q follow no weights (in Python: live_weights=True or ringbatch.torch.follow)",
				status.ErrNoWorker, name)
		}
	}
	return nil
}

// sayWaiting adds the names whose workers wait for weights: most often one of them is meant.
func (w *weights) sayWaiting(err error) error {
	if len(w.waiting) == 0 || !errors.Is(err, status.ErrUnknownModel) {
		return err
	}
	return fmt.Errorf("%w; workers wait for weights of %q", err, slices.Sorted(maps.Keys(w.waiting)))
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

// forget gives back the memory of weights, and disconnects their peers.
func (w *weights) forget(b *Broker, m *modelWeights) {
	for _, p := range m.peers() {
		_ = p.conn.Close()
	}
	m.Segment().Close()
	m.device.Close()
	b.users.uncount(m.uid, ofWeights, 0, m.Size+m.DeviceSize)
	delete(w.models, m.model)
}

func (m *modelWeights) peers() []*weightsPeer {
	return slices.DeleteFunc(append(m.followers[:len(m.followers):len(m.followers)], m.publisher), func(p *weightsPeer) bool { return p == nil })
}

// forgetUnused forgets weights whose model and peers are gone.
func (w *weights) forgetUnused(b *Broker) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.models {
		if len(m.peers()) == 0 && !b.models.serves(m.model) {
			w.forget(b, m)
		}
	}
}

// dropDevices gives the device memory back after it was lost.
func (w *weights) dropDevices(b *Broker) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.models {
		if m.DeviceSize > 0 {
			w.forget(b, m)
		}
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

func (w *weights) detach(p *weightsPeer) {
	w.leave(p)
	w.forgetUnused(p.Broker)
}

func (w *weights) leave(p *weightsPeer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	name := p.req.Model
	if w.waiting[name] = slices.DeleteFunc(w.waiting[name], func(q *weightsPeer) bool { return q == p }); len(w.waiting[name]) == 0 {
		delete(w.waiting, name)
	}
	m := w.models[name]
	if m == nil {
		return
	}
	if m.publisher == p {
		m.publisher = nil
	}
	if i := slices.Index(m.followers[:], p); i >= 0 {
		m.followers[i] = nil
		m.ForgetFollower(i)
	}
}

// withdraw refuses a version for an administrator.
func (w *weights) withdraw(model string, version uint32) error {
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
			s.Publisher = int(m.publisher.cred.Pid)
		}
		for i, f := range m.followers {
			if f != nil {
				s.Followers = append(s.Followers, stats.Follower{Pid: int(f.cred.Pid), Name: f.req.Name, Version: uint32(m.Loaded(i))})
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
