// SPDX-License-Identifier: Apache-2.0

// Package attach attaches clients and workers to the broker: it calls the broker, receives
// the segments, and checks everything before use.
package attach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/backoff"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// callTimeout bounds one exchange with a broker that does not answer, unless the caller's
// context ends earlier.
const callTimeout = 10 * time.Second

// Session is an attached connection with its mapped segments.
type Session struct {
	Info     control.Attached
	Layout   *shm.Layout
	Settings policy.Settings // the model's policy at the time of attaching
	Planes   *shm.Segment
	BoardSeg *shm.Segment
	Board    *shm.Board
	Words    *shm.Segment // the session's own segment
	Doorbell shm.Doorbell
	Device   Device // nil if no tensor of this peer is in device memory

	conn *net.UnixConn
}

// Dial connects to the broker's socket.
func Dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	if err := control.CheckFolder(socket); err != nil {
		return nil, fmt.Errorf("%w: %w", status.ErrForbidden, err)
	}
	c, err := dial(ctx, socket, callTimeout)
	switch {
	case err == nil:
		return c.(*net.UnixConn), nil
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("%w: %s: %v", status.ErrForbidden, socket, err)
	case shm.OutOfDescriptors(err):
		return nil, fmt.Errorf("%w: it is this process that has none: %v", status.ErrNoDescriptors, err)
	case errors.Is(err, unix.EAGAIN) && ctx.Err() != nil:
		return nil, fmt.Errorf("%s: %w", queueIsFull(socket), ctx.Err())
	case errors.Is(err, unix.EAGAIN):
		return nil, fmt.Errorf("%w: %s", status.ErrTimeout, queueIsFull(socket))
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, context.DeadlineExceeded): // ours, noticed a moment before the context
		return nil, context.DeadlineExceeded
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("%w (socket %s; RINGBATCH_SOCKET names another)", status.ErrNoBroker, socket)
	}
	return nil, fmt.Errorf("%w (socket %s: %v)", status.ErrNoBroker, socket, err)
}

func queueIsFull(socket string) string {
	return fmt.Sprintf("more connections wait at %s than the broker takes; is it stopped?", socket)
}

// dial connects. While the broker's queue of connections is full, it tries again, with
// longer and longer pauses. If the queue is still full when patience or the context
// ends, the error is EAGAIN.
func dial(ctx context.Context, socket string, patience time.Duration) (net.Conn, error) {
	var d net.Dialer
	var full error
	end := time.Now().Add(patience)
	var pause backoff.Backoff
	for {
		c, err := d.DialContext(ctx, "unix", socket)
		switch {
		case errors.Is(err, unix.EAGAIN):
			full = err
		case err != nil && full != nil && (ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded)):
			return nil, full
		default:
			return c, err
		}
		if time.Now().After(end) || !pause.Wait(ctx) {
			return nil, full
		}
	}
}

// Call sends one request and returns the broker's reply. The reply's code becomes the
// error.
func Call(ctx context.Context, c *net.UnixConn, req *control.Request) (*control.Reply, []int, error) {
	return callWith(ctx, c, c.RemoteAddr().String(), req, -1)
}

// callWith is Call with the socket's path for errors, and the descriptor that the request
// announces, or -1.
func callWith(ctx context.Context, c *net.UnixConn, socket string, req *control.Request, offer int) (*control.Reply, []int, error) {
	deadline := time.Now().Add(callTimeout)
	switch req.Op {
	case control.OpWatch:
		deadline = deadline.Add(control.WatchTime)
	case control.OpTrace:
		deadline = deadline.Add(2 * time.Duration(req.Millis) * time.Millisecond)
	case control.OpRestart, control.OpScale, control.OpSleep, control.OpWake:
		deadline = deadline.Add(control.ChangeTime)
	}
	stop := context.AfterFunc(ctx, func() { hangUp(c) })
	req.Version = control.Version
	var rep control.Reply
	// A broker that refuses a peer may answer and hang up before it reads the request.
	// Its reply says more than a broken pipe.
	sent := control.Send(c, deadline, req)
	if sent == nil && offer >= 0 {
		sent = control.SendOffer(c, deadline, offer)
	}
	fds, err := control.ReceiveReply(c, deadline, &rep)
	if err != nil && sent != nil {
		err = sent
	}
	if !stop() { // ctx has ended, the connection is closed
		control.CloseFDs(fds)
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, nil, fmt.Errorf("waiting for the answer of the broker at %s was interrupted: %w", socket, ctx.Err())
		}
		return nil, nil, fmt.Errorf("the broker at %s did not answer: %w", socket, ctx.Err())
	}
	if err != nil {
		control.CloseFDs(fds)
		if shm.OutOfDescriptors(err) {
			return nil, nil, fmt.Errorf("%w: it is this process that has none: %v", status.ErrNoDescriptors, err)
		}
		return nil, nil, fmt.Errorf("%w: %s: %w", status.ErrBrokerGone, req.Op, err)
	}
	if rep.Version < control.Version { // a newer broker serves this version, or says why not
		control.CloseFDs(fds)
		return nil, nil, fmt.Errorf("%w: the broker speaks control version %d, this program %d; bring the broker up to date",
			status.ErrVersion, rep.Version, control.Version)
	}
	if rep.Code != 0 {
		control.CloseFDs(fds)
		return &rep, nil, StatusError(status.Code(rep.Code), rep.Message)
	}
	return &rep, fds, nil
}

// hungUp reports whether the broker ended the connection instead of answering. If another
// broker took over the socket, that broker will answer.
func hungUp(err error) bool {
	return errors.Is(err, status.ErrBrokerGone) &&
		(errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, unix.EPIPE))
}

// Ask is CallOnce for requests that may be sent twice: if the broker hangs up, Ask calls
// the broker that has the socket by then.
func Ask(ctx context.Context, socket string, req *control.Request) (rep *control.Reply, err error) {
	err = untilAnswered(func() error {
		rep, err = CallOnce(ctx, socket, req)
		return err
	})
	return rep, err
}

// untilAnswered tries again when the broker hangs up.
func untilAnswered(try func() error) error {
	err := try()
	for n := 0; hungUp(err) && n < successors; n++ {
		err = try()
	}
	return err
}

// successors is the most brokers that may take over, one after the other, during one call.
const successors = 4

// CallOnce dials, calls and hangs up.
func CallOnce(ctx context.Context, socket string, req *control.Request) (*control.Reply, error) {
	c, err := Dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	defer hangUp(c)
	rep, fds, err := callWith(ctx, c, socket, req, -1)
	control.CloseFDs(fds)
	return rep, err
}

// hangUp ends a connection for all processes that share it. Closing this process's
// descriptor would not be enough: a forked child may keep the connection open, and the
// broker would go on serving the session.
func hangUp(c *net.UnixConn) {
	if raw, err := c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
	_ = c.Close()
}

// StatusError is an error with a text that matches a status.
func StatusError(s status.Code, text string) error {
	if text == "" {
		return s
	}
	return &statusError{s, text}
}

type statusError struct {
	status status.Code
	text   string
}

func (e *statusError) Error() string { return e.text }
func (e *statusError) Unwrap() error { return e.status }

// Open attaches: it sends req (OpClient or OpWorker) and maps the segments of the reply.
func Open(ctx context.Context, socket string, req *control.Request) (*Session, error) {
	return OpenWith(ctx, socket, nil, req)
}

// attacher has the arguments of an attachment.
type attacher struct {
	socket string
	device Device // nil: none
}

// attach asks for a session, with a descriptor of device memory or -1. The broker may
// answer with device memory that it needs from the worker first.
func (a *attacher) attach(ctx context.Context, req *control.Request, offer int) (s *Session, needs *control.DeviceNeed, err error) {
	err = untilAnswered(func() error {
		s, needs, err = a.tryAttach(ctx, req, offer)
		return err
	})
	return s, needs, err
}

func (a *attacher) tryAttach(ctx context.Context, req *control.Request, offer int) (*Session, *control.DeviceNeed, error) {
	c, err := Dial(ctx, a.socket)
	if err != nil {
		return nil, nil, err
	}
	asked := shm.Now()
	rep, fds, err := callWith(ctx, c, a.socket, req, offer)
	if err == nil && rep.Needs != nil {
		control.CloseFDs(fds)
		hangUp(c)
		return nil, rep.Needs, nil
	}
	if err == nil {
		if err = sameClock(rep.Attached, asked, shm.Now()); err != nil {
			control.CloseFDs(fds)
		}
	}
	if err != nil {
		hangUp(c)
		return nil, nil, err
	}
	s, err := a.open(req.Op, rep, fds)
	if err != nil {
		hangUp(c)
		return nil, nil, err
	}
	s.conn = c
	_ = c.SetDeadline(time.Time{})
	return s, nil, nil
}

// sameClock refuses a broker with another CLOCK_MONOTONIC: every deadline would be off by
// the difference. The broker read its clock between asked and now.
func sameClock(a *control.Attached, asked, now int64) error {
	if a == nil || a.Clock >= asked && a.Clock <= now {
		return nil
	}
	return fmt.Errorf("%w: the broker's monotonic clock is %v away from this process's: they are in different time namespaces; "+
		"start both in one", status.ErrNamespace, time.Duration(a.Clock-now))
}

// open checks the reply and maps its segments. It owns fds.
func (at *attacher) open(op control.Op, rep *control.Reply, fds []int) (s *Session, err error) {
	want := 4
	if rep.Attached != nil && rep.Attached.DeviceSize != 0 {
		want = 5
	}
	if rep.Attached == nil || len(fds) != want {
		control.CloseFDs(fds)
		return nil, fmt.Errorf("%w: attach reply has %d descriptors", status.ErrProtocol, len(fds))
	}
	a := rep.Attached
	s = &Session{Info: *a, Doorbell: shm.Doorbell(fds[3])}
	left := fds[:3]
	memory := fds[4:] // of the device, if any
	defer func() {
		control.CloseFDs(memory)
		if err != nil {
			control.CloseFDs(left)
			s.Close()
			s = nil
		}
	}()
	sig, err := tensor.ParseSignature(a.Inputs, a.Outputs, a.State...)
	if err != nil {
		return s, err
	}
	if s.Settings, err = policy.Policy(a.Policy).Known().Resolve(sig.Inputs); err != nil {
		return s, fmt.Errorf("%w: the policy of %s: %w", status.ErrProtocol, a.Model, err)
	}
	if s.Layout, err = layoutOf(a, sig); err != nil {
		return s, err
	}
	uses := &sig
	if op == control.OpClient {
		uses = sig.WithoutState()
	}
	if err = s.openDevice(at.device, uses, &memory); err != nil {
		return s, err
	}
	if s.Layout.Geometry != a.Geometry || s.Layout.PlanesSize != a.PlanesSize || s.Layout.BoardSize != a.BoardSize {
		return s, fmt.Errorf("%w: the broker lays %s out differently", status.ErrLayout, a.Model)
	}
	kind, boardAccess, sessionSize := shm.KindWorker, shm.ReadWrite, int64(0)
	if op == control.OpClient {
		if a.Window < 1 || int64(a.FirstSlot)+int64(a.Window) > int64(a.Slots) {
			return s, fmt.Errorf("%w: window of %d slots at %d in a ring of %d", status.ErrLayout, a.Window, a.FirstSlot, a.Slots)
		}
		kind, boardAccess, sessionSize = shm.KindClient, shm.ReadOnly, shm.ClientSegmentSize(a.Window, a.Times)
	} else {
		if a.Depth < 1 || a.Depth > shm.MaxMailDepth {
			return s, fmt.Errorf("%w: mailbox depth %d", status.ErrLayout, a.Depth)
		}
		sessionSize = shm.WorkerSegmentSize(a.Depth, a.MaxBatch)
	}
	if sessionSize != a.SessionSize {
		return s, fmt.Errorf("%w: session segment of %d bytes, expected %d", status.ErrLayout, a.SessionSize, sessionSize)
	}
	for _, m := range []struct {
		into   **shm.Segment
		size   int64
		access shm.Access
		kind   shm.Kind
	}{
		{&s.Planes, a.PlanesSize, shm.ReadWrite, shm.KindPlanes},
		{&s.BoardSeg, a.BoardSize, boardAccess, shm.KindBoard},
		{&s.Words, a.SessionSize, shm.ReadWrite, kind},
	} {
		fd := left[0]
		left = left[1:]
		if *m.into, err = shm.Open(fd, m.size, m.access); err != nil {
			return s, fmt.Errorf("attach %s: %w", a.Model, err)
		}
		(*m.into).CloseFD() // the mapping stays
		if m.kind == shm.KindPlanes {
			continue // any client can write its header; the board's header proves the epoch
		}
		if err = s.Layout.CheckHeader(*m.into, m.kind, rep.Epoch); err != nil {
			return s, fmt.Errorf("attach %s: %w", a.Model, err)
		}
	}
	s.Board = shm.NewBoard(s.Layout, s.BoardSeg)
	return s, nil
}

// layoutOf is the layout that the reply describes.
func layoutOf(a *control.Attached, sig tensor.Signature) (*shm.Layout, error) {
	if len(a.Planes) == 0 {
		return shm.NewLayout(sig, a.Slots, a.MaxBatch)
	}
	planes, err := tensor.ParseSpecs(a.Planes, nil)
	if err != nil {
		return nil, err
	}
	return shm.NewPipelineLayout(planes, sig, a.Slots, a.MaxBatch)
}

// Gone blocks until the broker hangs up, the session is closed, or StopWatching is called.
func (s *Session) Gone() { s.Watch(func() {}) }

// Watch is Gone, and calls again each time the broker asks the client to attach again.
func (s *Session) Watch(again func()) {
	var b [1]byte
	for {
		n, err := s.conn.Read(b[:])
		if err != nil {
			return
		}
		if n > 0 && b[0] == control.AttachAgain {
			again()
		}
	}
}

// StopWatching makes Gone return. The connection stays.
func (s *Session) StopWatching() { _ = s.conn.SetReadDeadline(time.Unix(1, 0)) }

// HangUp ends the session but keeps the mappings, so that views stay valid. It waits for
// the GPU first: the broker gives the slots to other peers at once.
func (s *Session) HangUp() {
	s.Synchronize()
	if s.conn != nil {
		hangUp(s.conn)
	}
}

// Synchronize waits until the GPU has finished all work of this process, if the session
// has device memory.
func (s *Session) Synchronize() {
	if s.Device != nil {
		s.Device.Synchronize()
	}
}

// Close hangs up and unmaps everything.
func (s *Session) Close() {
	s.HangUp()
	if s.Device != nil {
		s.Device.Close()
		s.Device = nil
	}
	for _, seg := range []*shm.Segment{s.Planes, s.BoardSeg, s.Words} {
		if seg != nil {
			seg.Close()
		}
	}
	if s.Doorbell >= 0 {
		_ = unix.Close(int(s.Doorbell))
		s.Doorbell = -1
	}
}
