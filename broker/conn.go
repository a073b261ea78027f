package broker

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
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
		b.Alive() // a broker whose loops do not answer is not there
	case control.OpModels:
		rep.Changes = b.models.changes.now() // before the list: what changes from now on is news
		rep.Models, rep.Draining = b.listModels(), b.models.drains()
	case control.OpStats:
		s := b.Snapshot()
		rep.Stats, err = json.Marshal(&s)
	case control.OpSet:
		err = b.setAndSave(req)
	case control.OpRestart, control.OpScale:
		err = b.changeWorkers(req)
	default:
		err = fmt.Errorf("%w: unknown operation %q", status.ErrInvalid, req.Op)
	}
	if err != nil {
		return b.refusal(err)
	}
	return rep
}
