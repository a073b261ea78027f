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
	// MaxFrame bounds what a peer can make us buffer.
	MaxFrame = 1 << 20
	// MaxFDs is the most descriptors that one frame carries.
	MaxFDs = 4
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
	size := binary.LittleEndian.Uint32(head[:])
	if size == 0 || size > MaxFrame {
		return fds, fmt.Errorf("%w: %d bytes", ErrFrame, size)
	}
	body := make([]byte, 0, min(size, 4096)) // grows with what really arrives
	buf := make([]byte, 4096)
	for uint32(len(body)) < size {
		n, err := c.Read(buf[:min(len(buf), int(size)-len(body))])
		if err != nil {
			return fds, err
		}
		body = append(body, buf[:n]...)
	}
	if err := Decode(body, msg); err != nil {
		return fds, err
	}
	return fds, nil
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
