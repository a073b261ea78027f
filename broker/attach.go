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

	"github.com/ringbatch/ringbatch/broker/batcher"
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
	defer offer.close() // unless the ring takes it
	if b.noPidfd != nil {
		b.refuse(b.noPidfd)
		return
	}
	p := newPeer(c, cred, b.process, b.takePidfd())
	p.name = req.Name
	if req.Op == control.OpWorker {
		b.super.AwaitStart(p.pid)
	}
	a, err := b.attach(p, req, &offer)
	if err != nil {
		p.discard()
		switch {
		case a != nil && errors.Is(err, errNeedsDevice):
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
		if a.worker != nil && b.super.AwaitsReady(p.pid) {
			go b.awaitFirstLook(a.model.loop, a.worker)
		}
		_ = c.SetReadDeadline(time.Time{})
		var one [1]byte
		if n, _ := c.Read(one[:]); n > 0 {
			b.log.Warn("peer disconnected: it spoke after attaching", "pid", p.pid)
			why = "it spoke after attaching"
		}
	}
	a.model.loop.do(func() { a.left(why) })
}

var errDescriptors = fmt.Errorf("%w: it is the broker that has none", status.ErrNoDescriptors)

// attachment is a session that has begun.
type attachment struct {
	model    *model
	follower *follower // nil: it did not ask for an alias
	reply    *control.Reply
	fds      []int            // for the peer; to be closed once they were sent
	left     func(why string) // to be called on the model's loop
	worker   *workerSession   // nil: it is a client's; its loop's
}

// attach finds or makes the model, opens the session, and has the model's loop
// take it. Only the last step is done on that loop. On an error what p has is
// still the caller's; with errNeedsDevice the attachment has a reply only.
func (b *Broker) attach(p *peer, req *control.Request, offer *deviceMemory) (a *attachment, err error) {
	m, s, f, err := b.modelFor(req, p)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.models.unfollow(f)
			b.models.leave(m) // the session would have
		}
	}()
	var desc batcher.Worker
	if req.Op == control.OpClient {
		if err = m.checkWindow(req.Window); err == nil {
			err = m.ring.openClient(p, req.Window, req.Times)
		}
	} else {
		desc, err = s.openWorker(p, req.Worker)
	}
	if err != nil {
		return nil, err
	}
	var notes []string
	if s != nil {
		notes, err = s.differences(req)
	}
	if err != nil {
		return nil, err
	}
	a = &attachment{model: m, follower: f, reply: b.reply()}
	var c *clientSession
	if req.Op == control.OpClient {
		if c, err = m.reserve(p, req.Window); err != nil {
			return nil, err
		}
	}
	if !m.loop.do(func() { err = a.begin(p, c, s, req, desc, offer) }) {
		err = status.ErrDraining
	}
	if errors.Is(err, errNeedsDevice) {
		a.reply.Needs = m.ring.need(&s.layout.Signature)
		return a, err
	}
	if err != nil {
		return nil, err
	}
	info := a.reply.Attached
	if info.Policy, info.Notes = m.policy(), notes; s != nil {
		info.Policy = s.policy()
	}
	if len(notes) > 0 {
		m.ring.log.Warn("worker asked for another policy than the model has", "worker", p.label(), "pid", p.pid, "differences", notes)
	}
	return a, nil
}

// policy is the stage's in force, as text; see model.policy.
func (s *stage) policy() policy.Policy { return s.inForce.Load().Policy(s.layout.Signature.Inputs) }

// differences are how the model's policy differs from what a worker asks for,
// a sentence each.
func (s *stage) differences(req *control.Request) (notes []string, err error) {
	list, err := policy.Policy(req.Policy).Differences(s.inForce.Load(), s.layout.Signature.Inputs)
	for _, d := range list {
		notes = append(notes, printable.Text(fmt.Sprintf("%s is %s, this worker asked for %s", d.Name, d.Is, d.Asked), 256))
	}
	return notes, err
}

// reserve gets a client its window, made new.
func (m *model) reserve(p *peer, window int) (c *clientSession, err error) {
	books := newBooks(window)
	if !m.loop.do(func() { c, err = m.ring.reserveWindow(p, window, books) }) {
		err = status.ErrDraining
	}
	if err == nil {
		c.resetWindow()
	}
	return c, err
}

// begin is the part of attach that runs on the model's loop. c is the client
// that attaches, whose window returns if it cannot; s the stage of a worker.
func (a *attachment) begin(p *peer, c *clientSession, s *stage, req *control.Request, desc batcher.Worker, offer *deviceMemory) (err error) {
	r := a.model.ring
	defer func() {
		if err != nil && c != nil {
			r.takeBack(c)
		}
	}()
	board := r.bseg.FD()
	if req.Op == control.OpClient {
		board = r.boardRO
		if r.loop.draining {
			return status.ErrDraining
		}
	}
	name, sig := a.model.name, &r.layout.Signature
	if s != nil {
		name, sig = s.cfg.Name, &s.layout.Signature
	}
	device, err := r.takeDevice(sig, req, offer)
	if err != nil {
		return err
	}
	a.fds = []int{dup(r.planes.FD()), dup(board)}
	defer func() {
		if err != nil {
			control.CloseFDs(a.fds)
			closeFD(device)
		}
	}()
	if a.fds[0] < 0 || a.fds[1] < 0 {
		return errDescriptors
	}
	info := &control.Attached{
		Model: name, Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs),
		Slots: r.layout.Slots, MaxBatch: r.layout.MaxBatch, Geometry: r.layout.Geometry,
		PlanesSize: r.layout.PlanesSize, BoardSize: r.layout.BoardSize, SessionSize: p.seg.Size(),
	}
	if r.isPipeline {
		for i := range r.layout.Planes {
			info.Planes = append(info.Planes, r.layout.Planes[i].Spec.String())
		}
	}
	if device >= 0 {
		info.DeviceSize, info.GPU = r.layout.DeviceSize, r.device.gpu
	}
	if s == nil {
		if info.Times = req.Times; info.Times {
			c.times = shm.NewClientTimes(p.seg, c.window)
		}
		if err := r.attachClient(c); err != nil {
			return err
		}
		info.FirstSlot, info.Window, info.FirstGen = c.first, c.window, c.firstGen()
		for _, s := range r.stages { // it goes through all of them
			if s.most < r.layout.MaxBatch && (info.MaxRows == 0 || s.most < info.MaxRows) {
				info.MaxRows = s.most
			}
		}
		a.left = func(why string) { r.clientLeft(c, why) }
	} else {
		if s.settings.Ragged && !asksForRagged(req.Policy) {
			return fmt.Errorf("%w: %q is ragged: its batches mix sizes, and this worker did not ask for that (ragged)", status.ErrInvalid, name)
		}
		w, err := s.attachWorker(p, *req.Worker, desc)
		if err != nil {
			return err
		}
		info.Depth, info.WorkerID, info.HandsOn = w.depth, uint32(w.id), s.next != nil
		a.left = func(why string) { s.workerLost(w, why) }
		a.worker = w
	}
	a.reply.Attached = info
	session, doorbell := p.takeFDs()
	if a.fds = append(a.fds, session, doorbell); device >= 0 {
		a.fds = append(a.fds, device)
	}
	return nil
}

// dup lets a connection's goroutine send a descriptor that the loop may close
// at any time.
func dup(fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1
	}
	return n
}

// modelFor finds the model, or makes it if a worker declares it. It stays
// until the caller, or the session that it begins, leaves it. Of a worker it is
// also the stage.
func (b *Broker) modelFor(req *control.Request, p *peer) (*model, *stage, *follower, error) {
	if req.Op == control.OpClient {
		if b.models.drains() {
			return nil, nil, nil, status.ErrDraining
		}
		signature, err := knownSignature(req)
		if err != nil {
			return nil, nil, nil, err
		}
		m, f, err := b.models.takeForClient(req.Model, signature, req.Follows, p.conn)
		return m, nil, f, err
	}
	m, s, err := b.modelForWorker(req, p.uid)
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
	if want := &s.layout.Signature; !sig.Equal(want) {
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
	if !m.loop.do(func() { m.loop.adopt(m.ring) }) {
		m.ring.close()
		return status.ErrDraining
	}
	return nil
}
