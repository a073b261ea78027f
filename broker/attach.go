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

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// serveSession attaches a client or a worker, and returns when the peer is gone. If the
// ring needs device memory, it asks the worker to come back with some.
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
		p.Kin = b.super.AwaitStart(p.Pid)
	}
	if req.Op == control.OpClient && b.super.GroupOf(p.Pid) == "" {
		b.idleness.count(1)
		defer b.idleness.count(-1)
	}
	a, err := b.attach(c, p, req, &offer)
	if err != nil {
		p.Discard()
		switch {
		case a != nil && errors.Is(err, engine.ErrNeedsDevice):
			b.send(a.reply)
		case errors.Is(err, status.ErrDraining) && b.isHandedOver():
			// The broker hangs up, and the peer finds the other broker.
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
		b.models.settleFollower(a.follower)
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
	follower *follower // nil: the peer did not ask for an alias
	reply    *control.Reply
	fds      []int // to send to the peer and close
	session  interface{ Leave(why string) }
	worker   *engine.WorkerSession // nil for a client
}

// attach finds or makes the model, and begins the session. On an error the caller keeps
// the peer. With ErrNeedsDevice the attachment has only a reply.
func (b *Broker) attach(conn *net.UnixConn, p *engine.Peer, req *control.Request, offer *engine.DeviceMemory) (a *attachment, err error) {
	m, s, f, err := b.modelFor(req, conn, p.UID)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.models.unfollow(f)
			b.models.leaveModel(m) // as the end of a session does
		}
	}()
	a = &attachment{model: m, follower: f, reply: b.reply()}
	if req.Op == control.OpClient {
		err = a.attachClient(p, req)
	} else {
		group := b.super.GroupOf(p.Pid)
		if err = a.attachWorker(p, s, req, offer, group); err == nil {
			b.models.noteWorker(m, group)
		}
	}
	return a, err
}

func (a *attachment) attachClient(p *engine.Peer, req *control.Request) error {
	m := a.model
	if err := m.checkWindow(req.Window); err != nil {
		return err
	}
	c, shared, err := m.ring.AttachClient(p, engine.ClientInfo{Window: req.Window, Times: req.Times, Device: req.Device})
	if err != nil {
		return err
	}
	info := a.describe(m.name, &m.layout.Signature, &shared)
	info.FirstSlot, info.Window, info.FirstGen = c.Window()
	info.Times, info.MaxRows, info.Policy = req.Times, m.ring.MaxRows(), m.policy()
	a.session = c
	return nil
}

func (a *attachment) attachWorker(p *engine.Peer, s *stage, req *control.Request, offer *engine.DeviceMemory, group string) error {
	info := engine.WorkerInfo{
		Depth: req.Worker.Depth, Lanes: req.Worker.Lanes, Share: req.Worker.Share, Pad: req.Worker.Pad, PadTo: req.Worker.PadTo,
		GPU: req.Worker.GPU, RunOnce: req.Worker.RunOnce, Ragged: asksForRagged(req.Policy),
		Program: req.Worker.Program, Group: group,
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

// describe writes the common part of the replies to clients and workers.
func (a *attachment) describe(name string, sig *tensor.Signature, shared *engine.Shared) *control.Attached {
	l := a.model.layout
	info := &control.Attached{
		Model: name, Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs), State: tensor.SpecTexts(sig.State),
		Slots: l.Slots, MaxBatch: l.MaxBatch, Geometry: l.Geometry,
		PlanesSize: l.PlanesSize, BoardSize: l.BoardSize, SessionSize: shared.SessionSize,
	}
	if a.model.isPipeline || len(l.Signature.State) > 0 {
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

func (s *stage) policy() policy.Policy { return s.InForce().Policy(s.Signature().Inputs) }

// differences lists where the stage's policy differs from a worker's, a sentence each.
func (s *stage) differences(req *control.Request) (notes []string, err error) {
	list, err := policy.Policy(req.Policy).Differences(s.InForce(), s.Signature().Inputs)
	for _, d := range list {
		notes = append(notes, printable.Text(fmt.Sprintf("%s is %s, this worker asked for %s", d.Name, d.Is, d.Asked), 256))
	}
	return notes, err
}

// modelFor finds the model, and a worker's stage. If a worker declares the model, the
// broker makes it. The caller, or its session, leaves the model.
func (b *Broker) modelFor(req *control.Request, conn *net.UnixConn, uid int) (*model, *stage, *follower, error) {
	if req.Op == control.OpClient {
		if b.models.isDraining() {
			return nil, nil, nil, status.ErrDraining
		}
		signature, err := knownSignature(req)
		if err != nil {
			return nil, nil, nil, err
		}
		m, f, err := b.models.takeForClient(req.Model, signature, req.Follows, conn)
		if starting := b.super.Starting(req.Model); errors.Is(err, status.ErrUnknownModel) && len(starting) > 0 {
			err = &unknownYet{fmt.Sprintf("there is no model %q yet; its worker may be among the processes that have been starting: %s",
				req.Model, strings.Join(starting[:min(len(starting), mostNamed)], ", "))}
		}
		return m, nil, f, err
	}
	m, s, err := b.modelForWorker(req, uid)
	return m, s, nil, err
}

// mostNamed bounds lists in errors.
const mostNamed = 10

// unknownYet is status.ErrUnknownModel without the advice to start a worker.
type unknownYet struct{ text string }

func (e *unknownYet) Error() string { return e.text }
func (e *unknownYet) Unwrap() error { return status.ErrUnknownModel }

// knownSignature is the signature of a client's earlier session; "" if it had none.
func knownSignature(req *control.Request) (string, error) {
	if len(req.Inputs)+len(req.Outputs) == 0 {
		return "", nil
	}
	sig, err := tensor.ParseSignature(req.Inputs, req.Outputs, req.State...)
	return sig.String(), err
}

func (b *Broker) modelForWorker(req *control.Request, uid int) (*model, *stage, error) {
	if req.Worker == nil {
		return nil, nil, fmt.Errorf("%w: worker without a signature", status.ErrInvalid)
	}
	sig, err := tensor.ParseSignature(req.Worker.Inputs, req.Worker.Outputs, req.Worker.State...)
	if err != nil {
		return nil, nil, err
	}
	if asksForRagged(req.Policy) && req.Worker.Pad != "" {
		return nil, nil, fmt.Errorf("%w: a ragged worker has no padding: each request lies in its own sizes", status.ErrInvalid)
	}
	// A worker may come to an existing model even while the broker drains: accepted
	// requests have to finish, also when the workers got the broker's SIGTERM, too.
	m, s, err := b.takeForWorker(req, sig, uid)
	if err != nil {
		return nil, nil, err
	}
	if want := s.Signature(); !sig.Equal(want) {
		b.models.leaveModel(m)
		return nil, nil, fmt.Errorf("%w: %q is %s, the worker serves %s", status.ErrSignatureMismatch, req.Model, want, &sig)
	}
	return m, s, nil
}

func (b *Broker) takeForWorker(req *control.Request, sig tensor.Signature, uid int) (m *model, s *stage, err error) {
	mc, stage, mine := ModelConfig{Name: req.Model, Signature: sig, Policy: req.Policy}, "", false
	if req.Pipeline == "" {
		b.models.forgetUnlike(&mc)
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
		b.models.forgetUnlike(&mc)
		m, mine, err = b.models.reserveName(mc.Name)
	}
	switch {
	case err != nil:
		return nil, nil, err
	case mine:
		if err := b.declareModel(m, mc, uid); err != nil {
			b.models.abandonModel(m)
			return nil, nil, err
		}
		b.models.publishModel(m, true)
	case len(mc.Stages) > 0 && mc.shape() != m.shape:
		b.models.leaveModel(m)
		return nil, nil, fmt.Errorf("%w: the pipeline %q is %s; the worker declares %s",
			status.ErrSignatureMismatch, mc.Name, m.shape, mc.shape())
	}
	switch {
	case stage != "":
		s, err = m.stageNamed(stage)
	case s == nil:
		s, err = m.onlyStage()
	}
	if err != nil {
		b.models.leaveModel(m)
	}
	return m, s, err
}

func (b *Broker) declareModel(m *model, mc ModelConfig, uid int) error {
	p, err := mc.resolve()
	if err != nil {
		return err
	}
	layout := p.layout
	if err := checkRing(mc.Name, layout); err != nil {
		return err
	}
	bytes := layout.PlanesSize + layout.DeviceSize
	if err := b.users.count(uid, ofModels, layout.Slots, bytes); err != nil {
		return fmt.Errorf("model %q: %w", mc.Name, err)
	}
	m.undeclare = sync.OnceFunc(func() { b.users.uncount(uid, ofModels, layout.Slots, bytes) })
	if err := b.makeModel(m, mc); err != nil {
		m.undeclare()
		return err
	}
	return nil
}

// asksForRagged reads one key of a policy that is not checked yet.
func asksForRagged(p policy.Policy) bool {
	ragged, err := strconv.ParseBool(p["ragged"])
	return err == nil && ragged
}

// makeModel builds a reserved model and has a loop adopt it. The caller publishes it.
func (b *Broker) makeModel(m *model, mc ModelConfig) error {
	if err := b.models.checkStages(&mc); err != nil {
		return err
	}
	if err := m.buildRing(b, mc); err != nil {
		return err
	}
	b.models.placeModel(m)
	if !m.loop.Do(func() { m.loop.AdoptRing(m.ring) }) {
		m.ring.Close()
		return status.ErrDraining
	}
	return nil
}

// maxGPUBytes is longer than any UUID.
const maxGPUBytes = 47

func receiveOffer(c *net.UnixConn, req *control.Request) (offer engine.DeviceMemory, err error) {
	if offer.FD = -1; req.Op != control.OpWorker && req.Op != control.OpWeights || req.GPU == "" {
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

// mayBeDevice accepts an open device, as a driver exports it, and no file or socket. A
// memfd passes: a driver without a GPU has it (hack/cuda/stub).
func mayBeDevice(fd int) bool {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false
	}
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	return st.Mode&unix.S_IFMT == unix.S_IFCHR || err == nil
}

// A new worker must look for batches before the supervisor ends the old one: on a busy
// machine that may be long after it attached. The broker cannot see the look of a worker
// that never waits. It believes such a worker after Config.firstLookTime.
const (
	defaultFirstLookTime = 5 * time.Second
	mostLookPause        = 20 * time.Millisecond
)

// awaitFirstLook reports to the supervisor when a worker is ready.
func (b *Broker) awaitFirstLook(w *engine.WorkerSession) {
	pause := time.Millisecond
	for end := time.Now().Add(b.cfg.firstLookTime); ; time.Sleep(pause) {
		looked, gone := w.HasLooked()
		if gone {
			return
		}
		if looked || time.Now().After(end) {
			b.super.Ready(w.Pid)
			return
		}
		pause = min(2*pause, mostLookPause)
	}
}
