// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sys/unix"
)

const (
	// MaxFrame bounds a reply's frame, MaxRequest a request: longer than any
	// that could be granted.
	MaxFrame   = 1 << 20
	MaxRequest = 256 << 10
	// MaxFDs is the most descriptors that one reply carries.
	MaxFDs = 5
)

// A frame's buffer begins with firstBytes, and takes no room up to freeBytes.
const (
	firstBytes = 512
	freeBytes  = 4 << 10
)

// ErrFrame is a length, depth or count outside the limits, or a body that is
// no such message.
var ErrFrame = errors.New("bad control frame")

// Send writes one frame: a little-endian uint32 length, then the msgpack
// body. The descriptors ride on the frame's first byte; they stay the
// caller's.
func Send(c *net.UnixConn, deadline time.Time, msg any, fds ...int) error {
	body, err := msgpack.Marshal(msg)
	if err != nil {
		return fmt.Errorf("encode control message: %w", err)
	}
	if len(body) > MaxFrame {
		return fmt.Errorf("%w: %d bytes", ErrFrame, len(body))
	}
	frame := binary.LittleEndian.AppendUint32(make([]byte, 0, 4+len(body)), uint32(len(body)))
	frame = append(frame, body...)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_ = c.SetWriteDeadline(deadline)
	n, _, err := c.WriteMsgUnix(frame, oob, nil)
	if err != nil {
		return err
	}
	for n < len(frame) { // a short write of a stream socket
		m, err := c.Write(frame[n:])
		if err != nil {
			return err
		}
		n += m
	}
	return nil
}

// Receive reads one frame into msg. The descriptors are the caller's to
// close, also when an error is returned beside them.
func Receive(c *net.UnixConn, deadline time.Time, msg any) (fds []int, err error) {
	_ = c.SetReadDeadline(deadline)
	var head [4]byte
	oob := make([]byte, unix.CmsgSpace(MaxFDs*4))
	n, oobn, flags, _, err := c.ReadMsgUnix(head[:], oob)
	if oobn > 0 {
		fds = parseFDs(oob[:oobn])
	}
	if err != nil {
		return fds, err
	}
	if n == 0 {
		return fds, io.EOF
	}
	if flags&unix.MSG_CTRUNC != 0 {
		if len(fds) < MaxFDs { // there was room for them here
			return fds, fmt.Errorf("%w: the kernel kept some descriptors back: %w", ErrFrame, unix.EMFILE)
		}
		return fds, fmt.Errorf("%w: more than %d descriptors", ErrFrame, MaxFDs)
	}
	if _, err := io.ReadFull(c, head[n:]); err != nil {
		return fds, err
	}
	size := int64(binary.LittleEndian.Uint32(head[:]))
	body, err := readBody(c, size, MaxFrame, nil)
	if err != nil {
		return fds, err
	}
	return fds, Decode(body, msg)
}

// Room is memory that connections share: Take says whether there is so much of
// it left, and what was taken is given back.
type Room interface {
	Take(bytes int) bool
	Give(bytes int)
}

// ErrNoRoom is a request that came while others had all the room.
var ErrNoRoom = errors.New("no room for a request of that size just now")

// ReceiveRequest reads one request. Descriptors that come with it are not
// received at all. A long one takes its room as its bytes arrive, until it was
// decoded: peers that never finish cannot make us buffer more than that in all.
func ReceiveRequest(c *net.UnixConn, deadline time.Time, room Room, req *Request) error {
	_ = c.SetReadDeadline(deadline)
	var head [4]byte
	if _, err := io.ReadFull(c, head[:]); err != nil {
		return err
	}
	taken := taken{room: room}
	defer taken.giveBack()
	body, err := readBody(c, int64(binary.LittleEndian.Uint32(head[:])), MaxRequest, &taken)
	if err != nil {
		return err
	}
	return Decode(body, req)
}

// SendOffer sends the descriptor that a request has announced (Request.GPU): with a
// byte of its own after it, so that nobody is handed one who did not look for it.
func SendOffer(c *net.UnixConn, deadline time.Time, fd int) error {
	_ = c.SetWriteDeadline(deadline)
	_, _, err := c.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil)
	return err
}

// ReceiveOffer is the other side of it. The descriptor is the caller's to close; if
// there are more they are not received.
func ReceiveOffer(c *net.UnixConn, deadline time.Time) (fd int, err error) {
	_ = c.SetReadDeadline(deadline)
	var one [1]byte
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := c.ReadMsgUnix(one[:], oob)
	fds := parseFDs(oob[:oobn])
	if err == nil && (n == 0 || len(fds) == 0) {
		err = fmt.Errorf("%w: the descriptor that it announces is missing", ErrFrame)
	}
	if err != nil {
		CloseFDs(fds)
		return -1, err
	}
	CloseFDs(fds[1:])
	return fds[0], nil
}

// taken is what a frame has taken of the room.
type taken struct {
	room  Room
	bytes int
}

// enough takes what a buffer of that size needs. A short one is free: every
// connection costs about as much by itself.
func (t *taken) enough(bytes int) bool {
	more := bytes - freeBytes - t.bytes
	if more <= 0 {
		return true
	}
	if !t.room.Take(more) {
		return false
	}
	t.bytes += more
	return true
}

func (t *taken) giveBack() { t.room.Give(t.bytes) }

// readBody reads a frame's body into a buffer that grows with what arrives.
func readBody(c *net.UnixConn, size, most int64, room *taken) ([]byte, error) {
	if size == 0 || size > most {
		return nil, fmt.Errorf("%w: %d bytes, must be 1..%d", ErrFrame, size, most)
	}
	var body []byte
	for have := 0; int64(have) < size; {
		if have == len(body) {
			next := int(min(size, int64(max(firstBytes, 2*have))))
			if room != nil && !room.enough(next) {
				return nil, ErrNoRoom
			}
			body = append(make([]byte, 0, next), body...)[:next]
		}
		n, err := c.Read(body[have:])
		if err != nil {
			return nil, err
		}
		have += n
	}
	return body, nil
}

// Decode reads a frame's body.
func Decode(body []byte, msg any) error {
	if err := check(body, msg); err != nil {
		return err
	}
	if err := msgpack.Unmarshal(body, msg); err != nil {
		if ofAnotherVersion(body, msg) {
			return nil
		}
		return fmt.Errorf("%w: %w", ErrFrame, err)
	}
	return nil
}

// ofAnotherVersion takes only the version of a message whose sender means
// something else by a key that we have: that is what its receiver must tell it.
func ofAnotherVersion(body []byte, msg any) bool {
	var head struct {
		Version int `msgpack:"version"`
	}
	isMap := body[0]&0xf0 == 0x80 || body[0] == 0xde || body[0] == 0xdf // a list would do for a struct as well
	if !isMap || msgpack.Unmarshal(body, &head) != nil || head.Version < 1 || head.Version == Version {
		return false
	}
	switch m := msg.(type) {
	case *Request:
		*m = Request{Version: head.Version}
	case *Reply:
		*m = Reply{Version: head.Version}
	}
	return true
}

func parseFDs(oob []byte) []int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var all []int
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err == nil {
			all = append(all, fds...)
		}
	}
	return all
}

// CloseFDs closes received descriptors that nobody wants.
func CloseFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
