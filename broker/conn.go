package broker

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/stats"
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
	for {
		c, err := b.listener.AcceptUnix()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			b.log.Warn("accept failed", "error", err) // out of descriptors, most likely
			time.Sleep(50 * time.Millisecond)
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
		refuse(fmt.Errorf("%w: here it is the broker that is full: %d connections, max_clients is %d", status.ErrRingFull, n, b.cfg.MaxClients))
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
			refuse(fmt.Errorf("%w: you speak control version %d, the broker %d", status.ErrVersion, req.Version, control.Version))
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
	ok := true
	switch req.Op {
	case control.OpPing:
	case control.OpModels:
		ok = b.do(func() { rep.Models, rep.Changes = b.listModels(), b.changes.now() })
	case control.OpStats:
		var s stats.Broker
		if ok = b.do(func() { s = b.snapshot() }); ok {
			rep.Stats, err = json.Marshal(&s)
		}
	case control.OpSet:
		if !b.do(func() { err = b.set(req.Model, req.Set) }) {
			ok = false
		}
	default:
		err = fmt.Errorf("%w: unknown operation %q", status.ErrInvalid, req.Op)
	}
	if !ok {
		err = status.ErrDraining
	}
	if err != nil {
		return b.refusal(err)
	}
	return rep
}

func (b *Broker) listModels() []control.Model {
	var list []control.Model
	for _, m := range b.models {
		list = append(list, control.Model{
			Name: m.cfg.Name, Inputs: tensor.SpecTexts(m.cfg.Signature.Inputs), Outputs: tensor.SpecTexts(m.cfg.Signature.Outputs),
			Policy: m.cfg.policyMessage(), Workers: m.workerCount(), Clients: len(m.clients),
		})
	}
	return list
}

// serveSession attaches a client or a worker and stays until it is gone.
func (b *Broker) serveSession(c *net.UnixConn, cred *unix.Ucred, req *control.Request) {
	p := newPeer(c, cred)
	p.name = req.Name
	if len(p.name) > tensor.MaxNameBytes {
		p.name = p.name[:tensor.MaxNameBytes]
	}
	var (
		rep  *control.Reply
		fds  []int
		err  error
		left func(why string)
	)
	if !b.do(func() { rep, fds, left, err = b.attach(p, req) }) {
		closeFD(p.pidfd)
		_ = control.Send(c, time.Now().Add(replyTime), b.refusal(status.ErrDraining))
		return
	}
	if err != nil {
		closeFD(p.pidfd)
		_ = control.Send(c, time.Now().Add(replyTime), b.refusal(err))
		return
	}
	err = control.Send(c, time.Now().Add(replyTime), rep, fds...)
	control.CloseFDs(fds)
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
	b.do(func() { left(why) })
}

var errDescriptors = fmt.Errorf("%w: out of file descriptors; raise the broker's limit (ulimit -n)", status.ErrNoMemory)

// attach runs on the loop. The descriptors it returns are the caller's.
func (b *Broker) attach(p *peer, req *control.Request) (_ *control.Reply, _ []int, _ func(string), err error) {
	// A worker may come to a model that it knows even then: what was accepted
	// has to finish, also when the workers got the broker's SIGTERM too.
	if b.draining && (req.Op == control.OpClient || b.models[req.Model] == nil) {
		return nil, nil, nil, status.ErrDraining
	}
	m, err := b.modelFor(req)
	if err != nil {
		return nil, nil, nil, err
	}
	info := &control.Attached{
		Model: m.cfg.Name, Inputs: tensor.SpecTexts(m.cfg.Signature.Inputs), Outputs: tensor.SpecTexts(m.cfg.Signature.Outputs),
		Slots: m.layout.Slots, MaxBatch: m.layout.MaxBatch, Geometry: m.layout.Geometry,
		PlanesSize: m.layout.PlanesSize, BoardSize: m.layout.BoardSize, Policy: m.cfg.policyMessage(),
	}
	board := m.bseg.FD()
	if req.Op == control.OpClient {
		board = m.boardRO
	}
	fds := []int{dup(m.planes.FD()), dup(board)} // first: a refusal needs the connection
	defer func() {
		if err != nil {
			control.CloseFDs(fds)
		}
	}()
	if fds[0] < 0 || fds[1] < 0 {
		b.maybeForget(m)
		return nil, nil, nil, errDescriptors
	}
	var left func(string)
	if req.Op == control.OpClient {
		c, err := m.attachClient(p, req.Window)
		if err != nil {
			return nil, nil, nil, err
		}
		info.FirstSlot, info.Window, info.FirstGen = c.first, c.window, c.firstGen()
		left = func(why string) { m.clientLeft(c, why) }
	} else {
		w, err := m.attachWorker(p, *req.Worker)
		if err != nil {
			b.maybeForget(m)
			return nil, nil, nil, err
		}
		info.Depth, info.WorkerID = w.depth, uint32(w.id)
		left = func(why string) { m.workerLost(w, why) }
	}
	info.SessionSize = p.seg.Size()
	rep := b.reply()
	rep.Attached = info
	session, doorbell := p.takeFDs()
	return rep, append(fds, session, doorbell), left, nil
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

// unknownModel also says which there are: most often the name has a typo.
func (b *Broker) unknownModel(name string) error {
	const most = 10
	there := slices.Sorted(maps.Keys(b.models))
	switch {
	case len(there) == 0:
		return fmt.Errorf("%w: %q; there are none", status.ErrUnknownModel, name)
	case len(there) > most:
		there = append(there[:most], "…")
	}
	return fmt.Errorf("%w: %q; there are %s", status.ErrUnknownModel, name, strings.Join(there, ", "))
}

// modelFor finds the model, or makes it if a worker declares it.
func (b *Broker) modelFor(req *control.Request) (*model, error) {
	m := b.models[req.Model]
	if req.Op == control.OpClient {
		if m == nil {
			return nil, b.unknownModel(req.Model)
		}
		return m, nil
	}
	if req.Worker == nil {
		return nil, fmt.Errorf("%w: worker without a signature", status.ErrInvalid)
	}
	sig, err := tensor.ParseSignature(req.Worker.Inputs, req.Worker.Outputs)
	if err != nil {
		return nil, err
	}
	if m != nil {
		if !sig.Equal(&m.cfg.Signature) {
			return nil, fmt.Errorf("%w: %q is %s, the worker serves %s", status.ErrSignatureMismatch, req.Model, &m.cfg.Signature, &sig)
		}
		return m, nil
	}
	mc := ModelConfig{Name: req.Model, Signature: sig}
	mc.Slots, mc.Lease, mc.Policy = fromPolicy(req.Policy)
	if m, err = b.newModel(mc); err != nil {
		return nil, err
	}
	m.dynamic = true
	b.models[req.Model] = m
	b.changes.note()
	return m, nil
}
