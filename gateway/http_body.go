// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http/httputil"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// sessionBody is what is left of the present request's body.
type sessionBody struct {
	in     *bufio.Reader
	left   int64     // -1: its end is to come
	chunks io.Reader // what it comes in; nil: in one piece
}

func (b *sessionBody) begin(h *simpleHead) {
	b.left, b.chunks = h.length, nil
	if h.chunked {
		b.chunks = httputil.NewChunkedReader(b.in)
	}
}

func (b *sessionBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	if b.chunks != nil {
		n, err := b.chunks.Read(p)
		if err == io.EOF {
			err = b.endChunks()
		}
		return n, err
	}
	n, err := b.in.Read(p[:min(int64(len(p)), b.left)])
	if b.left -= int64(n); err == io.EOF && b.left > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// endChunks reads what follows the last chunk. Trailers say nothing here, and
// make the request the last of its connection.
func (b *sessionBody) endChunks() error {
	end, err := b.in.Peek(len(lineEnd))
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	if bytes.Equal(end, lineEnd) {
		_, _ = b.in.Discard(len(lineEnd))
		b.left = 0
	}
	return io.EOF
}

// discard reads what is left, if that is no more than most.
func (b *sessionBody) discard(most int64) bool {
	if b.left <= most {
		_, _ = io.CopyN(io.Discard, b, most)
	}
	return b.left == 0
}

const (
	leastAwaited = 64 << 10 // of a body that is shorter there is nothing to wait for
	mostAwaited  = 1 << 20  // the kernel holds no more than that of each connection
)

// awaitBody parks until the kernel has the body, or mostAwaited of it. Then the
// slot is claimed when its bytes are there, and they come by one system call:
// a slow caller keeps no slot, and the few slots that are used stay in the
// processor's cache. While there are cores to spare the body is read as it
// comes instead, since that overlaps with the caller's writing.
func (s *session) awaitBody() error {
	n := min(s.body.left-int64(s.in.Buffered()), mostAwaited)
	if n < leastAwaited || s.door.g.inFlight.Load() <= int64(runtime.GOMAXPROCS(0)) {
		return nil
	}
	t, ok := s.conn.Conn.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	return bodyError(awaitReadable(raw, int(n)))
}

// awaitReadable parks until n bytes can be read, or the peer has hung up, or
// the read deadline is over.
func awaitReadable(raw syscall.RawConn, n int) error {
	first := true
	return raw.Read(func(fd uintptr) bool {
		if first {
			first = false
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, n)
		}
		poll := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLRDHUP}}
		if got, err := unix.Poll(poll[:], 0); err == nil && got == 0 {
			return false
		}
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVLOWAT, 1)
		return true
	})
}
