// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Limits of the control plane.
const (
	helloTime = 5 * time.Second // for a peer to send its request
	replyTime = 5 * time.Second // for a peer to take the reply

	// A program that connects all the time must not slow down clients and workers. The
	// loops have a turn after each connection, and other processes after acceptsInARow,
	// for up to a millisecond. (With a pause after every fourth connection, p99 beside
	// 30,000 connections a second was twice as high.)
	acceptsInARow = 16
	acceptPause   = 20 * time.Microsecond
)

func (b *Broker) acceptConns() {
	defer b.listener.useReserve()
	for n := 1; ; n++ {
		if n%acceptsInARow == 0 {
			time.Sleep(acceptPause)
		} else {
			runtime.Gosched()
		}
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
			_ = control.Send(c, time.Now().Add(replyTime), b.refusal(engine.ErrDescriptors)) // fits into the socket's empty buffer
			_ = c.Close()
			b.listener.refillReserve()
			continue
		}
		b.admitConn(c)
	}
}

// admitConn refuses a new connection, or starts a goroutine for it. A refusal costs no
// goroutine, and after the first few not even an answer.
func (b *Broker) admitConn(c *net.UnixConn) {
	refuse := func(uid uint32, err error) {
		b.refusals.refuseConn(c, uid, func() *control.Reply { return b.refusal(err) })
	}
	cred, err := peerCred(c)
	if err != nil {
		b.log.Warn("connection refused", "error", err)
		_ = c.Close()
		return
	}
	may := b.permissionsOf(c, cred)
	if may == 0 {
		b.log.Warn("connection refused: uid not allowed", "uid", cred.Uid, "pid", cred.Pid)
		refuse(cred.Uid, fmt.Errorf("%w: uid %d is not on its list; run this as its uid %d, or let yours in with --allow %d=infer, "+
			"or [[allow]] in its configuration", status.ErrForbidden, cred.Uid, os.Geteuid(), cred.Uid))
		return
	}
	pidfd, noPidfd := b.peerPidfd(c, cred)
	if shm.OutOfDescriptors(noPidfd) {
		noPidfd = engine.ErrDescriptors
	}
	m, err := b.users.admit(int(cred.Uid), processOf(pidfd, cred), may)
	if err != nil {
		engine.CloseFD(pidfd)
		b.log.Warn("connection refused: too many", "uid", cred.Uid, "pid", cred.Pid, "reason", err)
		refuse(cred.Uid, err)
		return
	}
	_ = c.SetWriteBuffer(sendBuffer)
	b.serving.Go(func() {
		defer context.AfterFunc(b.closing, func() { _ = c.Close() })()
		defer m.leave()
		defer c.Close()
		talk := &conversation{b, c, cred, may, m, pidfd, noPidfd}
		defer func() { engine.CloseFD(talk.takePidfd()) }()
		talk.serveRequests()
	})
}

const (
	// sendBuffer bounds the kernel's memory for replies that a peer does not take.
	sendBuffer = 8 << 10
	// answersAtOnce bounds the garbage of calls, some hundred kilobytes each.
	answersAtOnce = 8
)

type conversation struct {
	*Broker
	conn *net.UnixConn
	cred *unix.Ucred
	may  Permissions
	*member
	pidfd   int   // -1 once a session has it
	noPidfd error // why there was none
}

func (c *conversation) takePidfd() (fd int) {
	fd, c.pidfd = c.pidfd, -1
	return fd
}

// serveRequests answers calls, or serves one session until the peer hangs up.
func (c *conversation) serveRequests() {
	for {
		var req control.Request
		if !c.receiveRequest(&req) {
			return
		}
		if err := checkPermission(c.cred.Uid, c.may, req.Op); err != nil {
			c.log.Warn("request refused: not permitted", "uid", c.cred.Uid, "pid", c.cred.Pid, "operation", req.Op, "has", c.may)
			if !c.refuse(err) {
				return
			}
			continue
		}
		if lasts := req.Op == control.OpClient || req.Op == control.OpWorker ||
			req.Op == control.OpWatch || req.Op == control.OpWeights; lasts && c.callsOnly != nil {
			c.refuse(c.callsOnly)
			return
		}
		switch req.Op {
		case control.OpClient, control.OpWorker:
			time.Sleep(c.offenders.pauseOf(c.process))
			c.serveSession(c.conn, c.cred, &req)
			return
		case control.OpWeights:
			c.serveWeights(&req)
			return
		case control.OpWatch:
			if !c.answerWatch(c.conn, req.Since) {
				return
			}
		case control.OpTrace:
			if !c.answerTrace(&req) {
				return
			}
		case control.OpRestart, control.OpScale, control.OpSleep, control.OpWake: // they wait for workers, and must not hold up other calls
			if !c.send(c.answerCall(&req)) {
				return
			}
		default:
			c.answering <- struct{}{}
			rep := c.answerCall(&req)
			<-c.answering
			if !c.send(rep) {
				return
			}
		}
	}
}

// receiveRequest receives the peer's next request, or refuses it and returns false.
func (c *conversation) receiveRequest(req *control.Request) bool {
	err := control.ReceiveRequest(c.conn, time.Now().Add(helloTime), c.member, req)
	noRoom, broken := errors.Is(err, control.ErrNoRoom), errors.Is(err, control.ErrFrame)
	if noRoom || broken || errors.Is(err, os.ErrDeadlineExceeded) {
		c.log.Warn("connection dropped", "uid", c.cred.Uid, "pid", c.cred.Pid, "reason", err)
	}
	switch {
	case noRoom:
		c.refuse(fmt.Errorf("%w: %w; try again", status.ErrQuota, err))
	case broken:
		c.refuse(fmt.Errorf("%w: %w", status.ErrProtocol, err))
	case err != nil:
	default:
		if err = control.CheckVersion(req.Version); err == nil {
			err = sanitizeTexts(req)
		}
		if err != nil {
			c.refuse(err)
		}
	}
	return err == nil
}

// answerTrace answers OpTrace. The recording ends early if the peer hangs up.
func (c *conversation) answerTrace(req *control.Request) bool {
	over, stop := watchPeer(c.conn)
	t, err := c.traceModel(req.Model, time.Duration(req.Millis)*time.Millisecond, over)
	if stop() {
		return false
	}
	if err != nil {
		return c.refuse(err)
	}
	c.answering <- struct{}{} // for the memory that the text takes
	rep := c.reply()
	rep.Stats, err = json.Marshal(&t)
	<-c.answering
	if err != nil {
		return c.refuse(err)
	}
	return c.send(rep)
}

// send sends a reply. A long reply takes room (member.Take).
func (c *conversation) send(rep *control.Reply) bool {
	if bytes := rep.Bytes(); bytes > 4<<10 {
		if !c.Take(bytes) {
			return c.refuse(fmt.Errorf("%w: too many long replies to this user are under way; take them, then ask again", status.ErrQuota))
		}
		defer c.Give(bytes)
	}
	return control.SendReply(c.conn, time.Now().Add(replyTime), rep) == nil
}

func (c *conversation) refuse(err error) bool {
	return control.Send(c.conn, time.Now().Add(replyTime), c.refusal(err)) == nil
}

// maxTextBytes bounds the names of a peer and its device, wherever they are shown.
const maxTextBytes = tensor.MaxNameBytes

// The longest list of a policy fits.
const (
	maxProgramBytes = 2 * tensor.MaxNameBytes
	maxKeyBytes     = 2 * tensor.MaxNameBytes
	maxValueBytes   = 11 * policy.MaxBuckets
)

// sanitizeTexts refuses long texts, and cuts and escapes texts for a terminal.
func sanitizeTexts(req *control.Request) error {
	if len(req.Model) > tensor.MaxNameBytes {
		return fmt.Errorf("%w: a model's name of %d bytes, at most %d", status.ErrInvalid, len(req.Model), tensor.MaxNameBytes)
	}
	if len(req.Targets) > alias.MaxTargets || len(req.Inputs)+len(req.Outputs) > tensor.MaxTensors {
		return fmt.Errorf("%w: %d targets, %d tensors", status.ErrInvalid, len(req.Targets), len(req.Inputs)+len(req.Outputs))
	}
	for key, value := range req.Policy {
		if len(key) > maxKeyBytes || len(value) > maxValueBytes {
			return fmt.Errorf("%w: the policy's %s has %d bytes, a key has at most %d and its value %d",
				status.ErrInvalid, printable.Text(key, maxTextBytes), len(key)+len(value), maxKeyBytes, maxValueBytes)
		}
	}
	req.Name = printable.Text(req.Name, maxTextBytes)
	if req.Worker != nil {
		req.Worker.GPU = printable.Text(req.Worker.GPU, maxTextBytes)
		if p := printable.Text(req.Worker.Program, maxProgramBytes); p != req.Worker.Program {
			return fmt.Errorf("%w: a worker's version has at most %d bytes, all printable; got %q", status.ErrInvalid, maxProgramBytes, p)
		}
	}
	return nil
}

func (b *Broker) reply() *control.Reply {
	return &control.Reply{Version: control.Version, Pid: os.Getpid(), Epoch: b.epoch}
}

func (b *Broker) refusal(err error) *control.Reply {
	rep := b.reply()
	code := status.ErrInvalid
	_ = errors.As(err, &code)
	rep.Code, rep.Message = uint8(code), printable.Text(err.Error(), maxMessageBytes)
	return rep
}

// maxMessageBytes is enough for every error. Longer quotes of a peer's request are cut.
const maxMessageBytes = 2 << 10

func (b *conversation) answerCall(req *control.Request) *control.Reply {
	rep := b.reply()
	var err error
	switch req.Op {
	case control.OpPing:
		b.Alive() // a broker whose loops do not answer is not alive
	case control.OpModels:
		rep.Changes = b.models.changes.current() // before the list, so that a watch misses no change
		rep.Aliases = b.models.listAliases()
		rep.Models, rep.Draining = b.listModels(), b.models.isDraining()
	case control.OpStats:
		s := b.Snapshot()
		rep.Stats, err = json.Marshal(&s)
	case control.OpSet, control.OpRestart, control.OpScale:
		err = b.changeModel(req)
	case control.OpSleep, control.OpWake:
		err = b.staff.command(req.Model, req.Op == control.OpWake)
	case control.OpBatches:
		var s stats.Batches
		if s, err = b.batchesSince(req.Model, req.Since); err == nil {
			rep.Stats, err = json.Marshal(&s)
		}
	case control.OpHandOver:
		err = b.handOver()
	case control.OpWithdraw:
		err = b.weights.withdraw(req.Model, uint32(req.Since))
	case control.OpAlias:
		err = b.changeAlias(req)
	default:
		err = fmt.Errorf("%w: unknown operation %q", status.ErrInvalid, req.Op)
	}
	if err != nil {
		return b.refusal(err)
	}
	return rep
}
