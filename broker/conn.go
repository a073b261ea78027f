package broker

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Limits of the control plane.
const (
	helloTime = 5 * time.Second // for a peer to say what it wants
	replyTime = 5 * time.Second // for a peer to take our answer
)

// accept takes connections until the listener closes.
func (b *Broker) accept() {
	defer b.listener.useReserve()
	for {
		c, err := b.listener.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case shm.OutOfDescriptors(err) && b.listener.reserve != nil:
			b.listener.useReserve()
			continue
		case err != nil:
			b.log.Warn("accept failed", "error", err)
			time.Sleep(50 * time.Millisecond)
			continue
		case b.listener.reserve == nil && !b.listener.refillReserve():
			b.log.Warn("connection refused: no file descriptors; raise the limit of open files (ulimit -n, LimitNOFILE)")
			_ = control.Send(c, time.Now().Add(replyTime), b.refusal(errDescriptors)) // fits into the socket's empty buffer
			_ = c.Close()
			b.listener.refillReserve()
			continue
		}
		if !b.conns.add(c) {
			_ = c.Close()
			return
		}
		go func() {
			defer b.conns.remove(c)
			b.converse(c)
		}()
	}
}

// conns are the open connections, so that none outlives the broker.
type conns struct {
	mu     sync.Mutex
	open   map[*net.UnixConn]struct{}
	closed bool
	ended  sync.WaitGroup
}

func (s *conns) add(c *net.UnixConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	if s.open == nil {
		s.open = map[*net.UnixConn]struct{}{}
	}
	s.open[c] = struct{}{}
	s.ended.Add(1)
	return true
}

func (s *conns) remove(c *net.UnixConn) {
	s.mu.Lock()
	delete(s.open, c)
	s.mu.Unlock()
	s.ended.Done()
}

func (s *conns) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

// close hangs up on everybody and waits until the last goroutine has ended.
func (s *conns) close() {
	s.mu.Lock()
	s.closed = true
	for c := range s.open {
		_ = c.Close()
	}
	s.mu.Unlock()
	s.ended.Wait()
}

// converse serves one connection: calls, or one attachment that lasts until
// the peer hangs up.
func (b *Broker) converse(c *net.UnixConn) {
	defer c.Close()
	refuse := func(err error) { _ = control.Send(c, time.Now().Add(replyTime), b.refusal(err)) }
	cred, err := peerCred(c)
	if err != nil {
		b.log.Warn("connection refused", "error", err)
		return
	}
	if !b.allowed(int(cred.Uid)) {
		b.log.Warn("connection refused: uid not allowed", "uid", cred.Uid, "pid", cred.Pid)
		refuse(fmt.Errorf("%w: uid %d is not on its list", status.ErrForbidden, cred.Uid))
		return
	}
	if n := b.conns.count(); n > b.cfg.MaxClients {
		b.log.Warn("connection refused: too many", "pid", cred.Pid, "connections", n)
		refuse(fmt.Errorf("%w: max_clients is %d", status.ErrTooManyConnections, b.cfg.MaxClients))
		return
	}
	for {
		var req control.Request
		fds, err := control.Receive(c, time.Now().Add(helloTime), &req)
		control.CloseFDs(fds) // nobody sends us any
		if err != nil {
			if errors.Is(err, control.ErrFrame) || errors.Is(err, os.ErrDeadlineExceeded) {
				b.log.Warn("connection dropped", "pid", cred.Pid, "reason", err)
			}
			if errors.Is(err, control.ErrFrame) {
				refuse(fmt.Errorf("%w: %w", status.ErrProtocol, err))
			}
			return
		}
		if req.Version != control.Version {
			refuse(fmt.Errorf("%w: %s", status.ErrVersion, control.VersionAdvice("the broker", control.Version, "this program", req.Version)))
			return
		}
		switch req.Op {
		case control.OpClient, control.OpWorker:
			time.Sleep(b.offenders.pause(int(cred.Pid)))
			b.serveSession(c, cred, &req)
			return
		case control.OpWatch:
			if !b.watch(c, req.Since) {
				return
			}
		default:
			rep := b.answer(&req)
			if control.Send(c, time.Now().Add(replyTime), rep) != nil {
				return
			}
		}
	}
}

func (b *Broker) reply() *control.Reply {
	return &control.Reply{Version: control.Version, Pid: os.Getpid(), Epoch: b.epoch}
}

// refusal is the reply for an error: its status, and its text.
func (b *Broker) refusal(err error) *control.Reply {
	rep := b.reply()
	code := status.ErrInvalid
	_ = errors.As(err, &code)
	rep.Code, rep.Message = uint8(code), err.Error()
	return rep
}

// answer serves the calls that are not attachments.
func (b *Broker) answer(req *control.Request) *control.Reply {
	rep := b.reply()
	var err error
	switch req.Op {
	case control.OpPing:
	case control.OpModels:
		rep.Changes = b.models.changes.now() // before the list: what changes from now on is news
		for _, m := range b.models.list() {
			m.do(func() { rep.Models = append(rep.Models, m.line()) })
		}
	case control.OpStats:
		s := b.Snapshot()
		rep.Stats, err = json.Marshal(&s)
	case control.OpSet:
		err = b.set(req.Model, req.Policy)
	default:
		err = fmt.Errorf("%w: unknown operation %q", status.ErrInvalid, req.Op)
	}
	if err != nil {
		return b.refusal(err)
	}
	return rep
}

// serveSession attaches a client or a worker and stays until it is gone.
func (b *Broker) serveSession(c *net.UnixConn, cred *unix.Ucred, req *control.Request) {
	p := newPeer(c, cred)
	p.name = req.Name
	if len(p.name) > tensor.MaxNameBytes {
		p.name = p.name[:tensor.MaxNameBytes]
	}
	a, err := b.attach(p, req)
	if err != nil {
		p.discard()
		_ = control.Send(c, time.Now().Add(replyTime), b.refusal(err))
		return
	}
	err = control.Send(c, time.Now().Add(replyTime), a.reply, a.fds...)
	control.CloseFDs(a.fds)
	why := "it hung up"
	if err != nil {
		why = "it did not take the attach reply"
	} else {
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
	model *model
	reply *control.Reply
	fds   []int            // for the peer; to be closed once they were sent
	left  func(why string) // to be called on the model's loop
}

// attach finds or makes the model, opens the session, and has the model's loop
// take it. Only the last step is done on that loop. On an error what p has is
// still the caller's.
func (b *Broker) attach(p *peer, req *control.Request) (a *attachment, err error) {
	m, err := b.modelFor(req)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			b.models.leave(m) // the session would have
		}
	}()
	var desc batcher.Worker
	if req.Op == control.OpClient {
		err = m.ring.openClient(p, req.Window)
	} else {
		desc, err = m.stage.openWorker(p, req.Worker)
	}
	if err != nil {
		return nil, err
	}
	a = &attachment{model: m, reply: b.reply()}
	if !m.loop.do(func() { err = a.begin(p, req, desc) }) {
		err = status.ErrDraining
	}
	return a, err
}

// begin is the part of attach that runs on the model's loop.
func (a *attachment) begin(p *peer, req *control.Request, desc batcher.Worker) (err error) {
	r, s := a.model.ring, a.model.stage
	board := r.bseg.FD()
	if req.Op == control.OpClient {
		board = r.boardRO
		if r.loop.draining {
			return status.ErrDraining
		}
	}
	a.fds = []int{dup(r.planes.FD()), dup(board)}
	defer func() {
		if err != nil {
			control.CloseFDs(a.fds)
		}
	}()
	if a.fds[0] < 0 || a.fds[1] < 0 {
		return errDescriptors
	}
	sig := &r.layout.Signature
	info := &control.Attached{
		Model: a.model.name, Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs),
		Slots: r.layout.Slots, MaxBatch: r.layout.MaxBatch, Geometry: r.layout.Geometry,
		PlanesSize: r.layout.PlanesSize, BoardSize: r.layout.BoardSize, SessionSize: p.seg.Size(), Policy: s.settings.Policy(sig.Inputs),
	}
	if req.Op == control.OpClient {
		c, err := r.attachClient(p, req.Window)
		if err != nil {
			return err
		}
		info.FirstSlot, info.Window, info.FirstGen = c.first, c.window, c.firstGen()
		a.left = func(why string) { r.clientLeft(c, why) }
	} else {
		differences, err := policy.Policy(req.Policy).Differences(&s.settings, sig.Inputs)
		if err != nil {
			return err
		}
		if s.settings.Ragged && !asksForRagged(req.Policy) {
			return fmt.Errorf("%w: %q is ragged: its batches mix sizes, and this worker did not ask for that (ragged)", status.ErrInvalid, a.model.name)
		}
		w, err := s.attachWorker(p, *req.Worker, desc)
		if err != nil {
			return err
		}
		info.Depth, info.WorkerID = w.depth, uint32(w.id)
		for _, d := range differences {
			info.Notes = append(info.Notes, fmt.Sprintf("%s is %s, this worker asked for %s", d.Name, d.Is, d.Asked))
		}
		if len(info.Notes) > 0 {
			s.log.Warn("worker asked for another policy than the model has", "worker", w.label(), "pid", w.pid, "differences", info.Notes)
		}
		a.left = func(why string) { s.workerLost(w, why) }
	}
	a.reply.Attached = info
	session, doorbell := p.takeFDs()
	a.fds = append(a.fds, session, doorbell)
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
// until the caller, or the session that it begins, leaves it.
func (b *Broker) modelFor(req *control.Request) (*model, error) {
	if req.Op == control.OpClient {
		if b.models.drains() {
			return nil, status.ErrDraining
		}
		return b.models.take(req.Model)
	}
	if req.Worker == nil {
		return nil, fmt.Errorf("%w: worker without a signature", status.ErrInvalid)
	}
	sig, err := tensor.ParseSignature(req.Worker.Inputs, req.Worker.Outputs)
	if err != nil {
		return nil, err
	}
	if asksForRagged(req.Policy) && req.Worker.Pad != "" {
		return nil, fmt.Errorf("%w: a ragged worker has no padding: each request lies in its own sizes", status.ErrInvalid)
	}
	// A worker may come to a model that is there even while the broker drains:
	// what was accepted has to finish, also when the workers got the broker's
	// SIGTERM too.
	m, mine, err := b.models.reserve(req.Model)
	if err != nil {
		return nil, err
	}
	if mine {
		mc := ModelConfig{Name: req.Model, Signature: sig, Policy: req.Policy}
		if err := b.make(m, mc); err != nil {
			b.models.abandon(m)
			return nil, err
		}
		b.models.publish(m, true)
		return m, nil
	}
	if want := &m.ring.layout.Signature; !sig.Equal(want) {
		b.models.leave(m)
		return nil, fmt.Errorf("%w: %q is %s, the worker serves %s", status.ErrSignatureMismatch, req.Model, want, &sig)
	}
	return m, nil
}

// asksForRagged reads one key of a policy that may be wrong otherwise.
func asksForRagged(p policy.Policy) bool {
	ragged, err := strconv.ParseBool(p["ragged"])
	return err == nil && ragged
}

// make builds a reserved model and has a loop adopt it; to be published then.
func (b *Broker) make(m *model, mc ModelConfig) error {
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
