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
	uid       int // the user that it counts for
	publisher *weightsPeer
	followers [shm.WeightFollowers]*weightsPeer
}

type weightsPeer struct {
	pid  int
	name string
}

// serveWeights serves a publisher or a follower until it hangs up or its process ends.
func (b *conversation) serveWeights(req *control.Request) {
	if b.noPidfd != nil {
		b.refuse(b.noPidfd)
		return
	}
	peer := &weightsPeer{int(b.cred.Pid), req.Name}
	m, follower, err := b.weights.attach(b.Broker, int(b.cred.Uid), peer, req)
	if err != nil {
		b.refuse(err)
		return
	}
	rep := b.reply()
	rep.Weights = &control.Weights{Tensors: tensor.SpecTexts(m.Tensors), Follower: follower}
	err = control.Send(b.conn, time.Now().Add(replyTime), rep, m.Segment().FD())
	var one [1]byte
	for err == nil && !hasEnded(b.pidfd) { // a child of the peer may keep the connection
		_ = b.conn.SetReadDeadline(time.Now().Add(weightsLook))
		if _, err = b.conn.Read(one[:]); errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
	}
	if !errors.Is(err, net.ErrClosed) { // when this broker ends, a batch of the peer may still read its buffer
		b.weights.detach(m, follower)
	}
}

// weightsLook is how long the death of a peer may go unnoticed if a child has its connection.
const weightsLook = 500 * time.Millisecond

// attach finds or makes the segment, and enters the peer. A publisher's follower is -1.
func (w *weights) attach(b *Broker, uid int, peer *weightsPeer, req *control.Request) (m *modelWeights, follower int, err error) {
	if !tensor.ValidName(req.Model) || req.Weights == nil {
		return nil, 0, fmt.Errorf("%w: weights of the model %q", status.ErrInvalid, req.Model)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m = w.models[req.Model]
	if !req.Weights.Publish {
		if m == nil {
			return nil, 0, fmt.Errorf("%w: %q has no weights yet: nothing was published", status.ErrUnknownModel, req.Model)
		}
		free := slices.Index(m.followers[:], nil)
		if free < 0 {
			return nil, 0, fmt.Errorf("%w: %d workers follow the weights of %q", status.ErrQuota, shm.WeightFollowers, req.Model)
		}
		m.followers[free] = peer
		return m, free, nil
	}
	tensors, err := tensor.ParseSpecs(req.Weights.Tensors, nil)
	if err != nil {
		return nil, 0, err
	}
	layout, err := shm.NewWeightsLayout(tensors)
	if err != nil {
		return nil, 0, err
	}
	if m, err = w.forPublisher(b, uid, req.Model, layout); err != nil {
		return nil, 0, err
	}
	m.publisher = peer
	return m, -1, nil
}

// forPublisher is the segment of these tensors. While no worker follows, a publisher may
// replace a segment by another one.
func (w *weights) forPublisher(b *Broker, uid int, model string, layout *shm.WeightsLayout) (*modelWeights, error) {
	m := w.models[model]
	switch {
	case m != nil && m.publisher != nil:
		return nil, fmt.Errorf("%w: process %d publishes the weights of %q already", status.ErrBusy, m.publisher.pid, model)
	case m != nil && m.Geometry == layout.Geometry:
		return m, nil
	case m != nil && slices.ContainsFunc(m.followers[:], func(p *weightsPeer) bool { return p != nil }):
		return nil, fmt.Errorf("%w: workers follow weights of %q that differ: %s; end them, or publish under another name",
			status.ErrSignatureMismatch, model, firstDifference(m.Tensors, layout.Tensors))
	}
	if err := shm.CheckRoom(layout.Size); err != nil {
		return nil, fmt.Errorf("weights of %q: %w", model, err)
	}
	if err := b.users.countModel(uid, 0, layout.Size); err != nil {
		return nil, fmt.Errorf("weights of %q: %w", model, err)
	}
	segment, err := shm.CreateWeights(b.cfg.Memory, layout, b.epoch)
	if err != nil {
		b.users.uncountModel(uid, 0, layout.Size)
		return nil, err
	}
	if m != nil {
		m.Segment().Close()
		b.users.uncountModel(m.uid, 0, m.Size)
	}
	m = &modelWeights{Weights: segment, uid: uid}
	w.models[model] = m
	return m, nil
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
	if follower < 0 {
		m.publisher = nil
		return
	}
	m.followers[follower] = nil
	m.ForgetFollower(follower)
}

// refuse withdraws a version for an administrator.
func (w *weights) refuse(model string, version shm.Version) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.models[model]
	if m == nil {
		return fmt.Errorf("%w: %q has no weights", status.ErrUnknownModel, model)
	}
	if !m.Refuse(version, "withdrawn by hand") {
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
		s := stats.Weights{Model: name, Version: uint32(v), Last: uint32(m.Last()), Tensors: len(m.Tensors), Bytes: m.Size}
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
	}
	w.models = nil
}
