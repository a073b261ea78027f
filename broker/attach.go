// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"golang.org/x/sys/unix"
)

// serveSession attaches a client or a worker and stays until it is gone; or asks a
// worker for device memory, with which it comes back.
func (b *conversation) serveSession(c *net.UnixConn, cred *unix.Ucred, req *control.Request) {
	offer, err := receiveOffer(c, req)
	if err != nil {
		b.refuse(err)
		return
	}
	defer offer.Close() // unless the ring takes it
	if b.noPidfd != nil {
		b.refuse(b.noPidfd)
		return
	}
	p := engine.NewPeer(c, int(cred.Pid), int(cred.Uid), b.process, b.takePidfd(), req.Name)
	if req.Op == control.OpWorker {
		b.super.AwaitStart(p.Pid)
	}
	a, err := b.attach(c, p, req, &offer)
	if err != nil {
		p.Discard()
		switch {
		case a != nil && errors.Is(err, engine.ErrNeedsDevice):
			b.send(a.reply)
		case errors.Is(err, status.ErrDraining) && b.isHandedOver():
			// We hang up, and the peer finds the other broker.
		default:
			b.refuse(err)
		}
		return
	}
	a.reply.Attached.Clock = shm.Now()
	err = control.Send(c, time.Now().Add(replyTime), a.reply, a.fds...)
	defer b.models.unfollow(a.follower)
	control.CloseFDs(a.fds)
	why := "it hung up"
	if err != nil {
		why = "it did not take the attach reply"
	} else {
		b.models.settle(a.follower)
		if a.worker != nil && b.super.AwaitsReady(p.Pid) {
			go b.awaitFirstLook(a.worker)
		}
		_ = c.SetReadDeadline(time.Time{})
		var one [1]byte
		if n, _ := c.Read(one[:]); n > 0 {
			b.log.Warn("peer disconnected: it spoke after attaching", "pid", p.Pid)
			why = "it spoke after attaching"
		}
	}
	a.session.Leave(why)
}

// attachment is a session that has begun.
type attachment struct {
	model    *model
	follower *follower // nil: it did not ask for an alias
	reply    *control.Reply
	fds      []int // for the peer; to be closed once they were sent
	session  interface{ Leave(why string) }
	worker   *engine.WorkerSession // nil: it is a client's
}

// attach finds or makes the model, opens the session, and has the model's loop
// take it. On an error the caller still has everything of p. With ErrNeedsDevice
// the attachment has a reply only.
func (b *Broker) attach(conn *net.UnixConn, p *engine.Peer, req *control.Request, offer *engine.DeviceMemory) (a *attachment, err error) {
	m, s, f, err := b.modelFor(req, conn, p.UID)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.models.unfollow(f)
			b.models.leave(m) // the session would have
		}
	}()
	a = &attachment{model: m, follower: f, reply: b.reply()}
	if req.Op == control.OpClient {
		err = a.attachClient(p, req)
	} else {
		err = a.attachWorker(p, s, req, offer)
	}
	return a, err
}

// attachClient begins the session of a client.
func (a *attachment) attachClient(p *engine.Peer, req *control.Request) error {
	m := a.model
	if err := m.checkWindow(req.Window); err != nil {
		return err
	}
	if err := m.ring.OpenClient(p, req.Window, req.Times); err != nil {
		return err
	}
	c, err := m.ring.Reserve(p, req.Window)
	if err != nil {
		return err
	}
	shared, err := m.ring.AttachClient(c, req.Times, req.Device)
	if err != nil {
		return err
	}
	info := a.describe(m.name, &m.layout.Signature, &shared)
	info.FirstSlot, info.Window, info.FirstGen = c.Window()
	info.Times, info.MaxRows, info.Policy = req.Times, m.ring.MaxRows(), m.policy()
	a.session = c
	return nil
}

// attachWorker begins the session of a worker.
func (a *attachment) attachWorker(p *engine.Peer, s *stage, req *control.Request, offer *engine.DeviceMemory) error {
	info := engine.WorkerInfo{
		Depth: req.Worker.Depth, Lanes: req.Worker.Lanes, Weight: req.Worker.Weight, Pad: req.Worker.Pad, PadTo: req.Worker.PadTo,
		GPU: req.Worker.GPU, RunOnce: req.Worker.RunOnce, Ragged: asksForRagged(req.Policy),
	}
	if err := s.OpenWorker(p, &info); err != nil {
		return err
	}
	notes, err := s.differences(req)
	if err != nil {
		return err
	}
	w, shared, err := s.AttachWorker(p, info, offer)
	if errors.Is(err, engine.ErrNeedsDevice) {
		a.reply.Needs = &control.DeviceNeed{Bytes: a.model.layout.DeviceSize, Device: s.Signature().FirstOnDevice().Device()}
	}
	if err != nil {
		return err
	}
	reply := a.describe(s.Name(), s.Signature(), &shared)
	reply.Depth, reply.WorkerID, reply.HandsOn, reply.Isolates = info.Depth, w.ID(), s.HandsOn(), !info.RunOnce
	reply.Policy, reply.Notes = s.policy(), notes
	a.session, a.worker = w, w
	if len(notes) > 0 {
		a.model.log.Warn("worker asked for another policy than the model has", "worker", p.Label(), "pid", p.Pid, "differences", notes)
	}
	return nil
}

// describe writes the part of the reply that clients and workers have in common.
func (a *attachment) describe(name string, sig *tensor.Signature, shared *engine.Shared) *control.Attached {
	l := a.model.layout
	info := &control.Attached{
		Model: name, Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs),
		Slots: l.Slots, MaxBatch: l.MaxBatch, Geometry: l.Geometry,
		PlanesSize: l.PlanesSize, BoardSize: l.BoardSize, SessionSize: shared.SessionSize,
	}
	if a.model.isPipeline {
		for i := range l.Planes {
			info.Planes = append(info.Planes, l.Planes[i].Spec.String())
		}
	}
	if shared.HasDevice {
		info.DeviceSize, info.GPU = l.DeviceSize, shared.GPU
	}
	a.reply.Attached, a.fds = info, shared.FDs
	return info
}

// policy is the stage's in force, as text; see model.policy.
func (s *stage) policy() policy.Policy { return s.InForce().Policy(s.Signature().Inputs) }

// differences are how the model's policy differs from what a worker asks for,
// a sentence each.
func (s *stage) differences(req *control.Request) (notes []string, err error) {
	list, err := policy.Policy(req.Policy).Differences(s.InForce(), s.Signature().Inputs)
	for _, d := range list {
		notes = append(notes, printable.Text(fmt.Sprintf("%s is %s, this worker asked for %s", d.Name, d.Is, d.Asked), 256))
	}
	return notes, err
}

// modelFor finds the model, or makes it if a worker declares it. It stays
// until the caller, or the session that it begins, leaves it. Of a worker it is
// also the stage.
func (b *Broker) modelFor(req *control.Request, conn *net.UnixConn, uid int) (*model, *stage, *follower, error) {
	if req.Op == control.OpClient {
		if b.models.drains() {
			return nil, nil, nil, status.ErrDraining
		}
		signature, err := knownSignature(req)
		if err != nil {
			return nil, nil, nil, err
		}
		m, f, err := b.models.takeForClient(req.Model, signature, req.Follows, conn)
		return m, nil, f, err
	}
	m, s, err := b.modelForWorker(req, uid)
	return m, s, nil, err
}

// knownSignature is what a client was attached to before; "" if it was not.
func knownSignature(req *control.Request) (string, error) {
	if len(req.Inputs)+len(req.Outputs) == 0 {
		return "", nil
	}
	sig, err := tensor.ParseSignature(req.Inputs, req.Outputs)
	return sig.String(), err
}

func (b *Broker) modelForWorker(req *control.Request, uid int) (*model, *stage, error) {
	if req.Worker == nil {
		return nil, nil, fmt.Errorf("%w: worker without a signature", status.ErrInvalid)
	}
	sig, err := tensor.ParseSignature(req.Worker.Inputs, req.Worker.Outputs)
	if err != nil {
		return nil, nil, err
	}
	if asksForRagged(req.Policy) && req.Worker.Pad != "" {
		return nil, nil, fmt.Errorf("%w: a ragged worker has no padding: each request lies in its own sizes", status.ErrInvalid)
	}
	// A worker may come to a model that is there even while the broker drains:
	// what was accepted has to finish, also when the workers got the broker's
	// SIGTERM too.
	m, s, err := b.takeForWorker(req, sig, uid)
	if err != nil {
		return nil, nil, err
	}
	if want := s.Signature(); !sig.Equal(want) {
		b.models.leave(m)
		return nil, nil, fmt.Errorf("%w: %q is %s, the worker serves %s", status.ErrSignatureMismatch, req.Model, want, &sig)
	}
	return m, s, nil
}

// takeForWorker finds the model or stage that a worker names, or makes it as the
// worker declares it.
func (b *Broker) takeForWorker(req *control.Request, sig tensor.Signature, uid int) (m *model, s *stage, err error) {
	mc, stage, mine := ModelConfig{Name: req.Model, Signature: sig, Policy: req.Policy}, "", false
	if req.Pipeline == "" {
		m, s, mine, err = b.models.reserveStage(req.Model)
	} else {
		i := strings.LastIndexByte(req.Model, '/')
		if i < 1 {
			return nil, nil, fmt.Errorf("%w: %q: a worker of a pipeline names its stage, as PIPELINE/STAGE", status.ErrInvalid, req.Model)
		}
		stage = req.Model[i+1:]
		if mc, err = parsePipeline(req.Model[:i], req.Pipeline); err != nil {
			return nil, nil, err
		}
		m, mine, err = b.models.reserve(mc.Name)
	}
	switch {
	case err != nil:
		return nil, nil, err
	case mine:
		if err := b.declare(m, mc, uid); err != nil {
			b.models.abandon(m)
			return nil, nil, err
		}
		b.models.publish(m, true)
	case len(mc.Stages) > 0 && mc.shape() != m.shape:
		b.models.leave(m)
		return nil, nil, fmt.Errorf("%w: the pipeline %q is %s; the worker declares %s", status.ErrSignatureMismatch, mc.Name, m.shape, mc.shape())
	}
	switch {
	case stage != "":
		s, err = m.stageNamed(stage)
	case s == nil:
		s, err = m.only()
	}
	if err != nil {
		b.models.leave(m)
	}
	return m, s, err
}

// declare makes a reserved model that a worker of this user declares.
func (b *Broker) declare(m *model, mc ModelConfig, uid int) error {
	_, layout, err := mc.Resolve()
	if err != nil {
		return err
	}
	if err := b.checkRing(mc.Name, layout); err != nil {
		return err
	}
	bytes := layout.PlanesSize + layout.DeviceSize
	if err := b.users.declare(uid, layout.Slots, bytes); err != nil {
		return fmt.Errorf("model %q: %w", mc.Name, err)
	}
	m.undeclare = sync.OnceFunc(func() { b.users.undeclare(uid, layout.Slots, bytes) })
	if err := b.make(m, mc); err != nil {
		m.undeclare()
		return err
	}
	return nil
}

// asksForRagged reads one key of a policy that may be wrong otherwise.
func asksForRagged(p policy.Policy) bool {
	ragged, err := strconv.ParseBool(p["ragged"])
	return err == nil && ragged
}

// make builds a reserved model and has a loop adopt it; to be published then.
func (b *Broker) make(m *model, mc ModelConfig) error {
	if err := b.models.checkStages(&mc); err != nil {
		return err
	}
	if err := m.build(b, mc); err != nil {
		return err
	}
	b.models.place(m)
	if !m.loop.Do(func() { m.loop.Adopt(m.ring) }) {
		m.ring.Close()
		return status.ErrDraining
	}
	return nil
}
