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
	// MaxFrame bounds the frame of a reply, MaxRequest a request.
	MaxFrame   = 1 << 20
	MaxRequest = 256 << 10
	// MaxFDs is the most descriptors that one reply carries.
	MaxFDs = 5
)

// The buffer of a frame begins with firstBytes. Up to freeBytes it takes no Room.
const (
	firstBytes = 512
	freeBytes  = 4 << 10
)

// ErrFrame is the error for a frame that is no valid message or exceeds a limit.
var ErrFrame = errors.New("bad control frame")

// Send writes one frame: a little-endian uint32 length, then the msgpack body. The
// descriptors travel with the frame's first byte; the caller keeps and closes them.
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

// Receive reads one frame into msg. The caller closes the descriptors, even if Receive
// returns an error.
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
		if len(fds) < MaxFDs { // the buffer had room for more
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

// Room is a budget of memory that connections share. Take returns false if the budget has
// not that much left; Give returns memory to it.
type Room interface {
	Take(bytes int) bool
	Give(bytes int)
}

// ErrNoRoom is the error for a request that the Room has no memory for.
var ErrNoRoom = errors.New("no room for a request of that size just now")

// ReceiveRequest reads one request, without descriptors. A long request takes room as its
// bytes arrive, until it is decoded, so that unfinished requests cannot fill the memory.
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

// SendOffer sends the descriptor that a request has announced (Request.GPU), with a
// separate byte after the request: only a receiver that expects it receives it.
func SendOffer(c *net.UnixConn, deadline time.Time, fd int) error {
	_ = c.SetWriteDeadline(deadline)
	_, _, err := c.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil)
	return err
}

// ReceiveOffer receives the descriptor of SendOffer, and no other. The caller closes it.
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

// taken is the memory that a frame has taken from a Room.
type taken struct {
	room  Room
	bytes int
}

// enough takes room for a buffer of that size. A short buffer is free: a connection
// costs about as much anyway.
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

// readBody reads a frame's body into a buffer that grows as bytes arrive.
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

// ofAnotherVersion reads only the version of a message whose other keys this version
// cannot decode, so that the peer gets an error about the version.
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

// CloseFDs closes descriptors.
func CloseFDs(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
