// SPDX-License-Identifier: Apache-2.0

package control

import (
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// A frame of a long reply has about partBytes; a reply has at most maxParts frames.
const (
	partBytes = 256 << 10
	maxParts  = 1024
)

// SendReply sends a reply, in several frames if it is long. The descriptors travel with
// the first frame.
func SendReply(c *net.UnixConn, deadline time.Time, rep *Reply, fds ...int) error {
	for {
		part, rest, err := cut(rep)
		if err != nil {
			return err
		}
		if err := Send(c, deadline, part, fds...); err != nil || rest == nil {
			return err
		}
		rep, fds = rest, nil
	}
}

// cut splits a reply into its first frame and the rest.
func cut(rep *Reply) (part, rest *Reply, err error) {
	stats, models := len(rep.Stats), 0
	for bytes := 0; models < len(rep.Models); models++ {
		line, err := msgpack.Marshal(&rep.Models[models])
		if err != nil {
			return nil, nil, fmt.Errorf("encode control message: %w", err)
		}
		if bytes += len(line); bytes > partBytes && models > 0 {
			break
		}
	}
	stats = min(stats, partBytes)
	if stats == len(rep.Stats) && models == len(rep.Models) {
		return rep, nil, nil
	}
	first, next := *rep, *rep
	first.Stats, next.Stats = rep.Stats[:stats], rep.Stats[stats:]
	first.Models, next.Models = rep.Models[:models], rep.Models[models:]
	first.More = true
	next.Attached, next.Aliases = nil, nil
	return &first, &next, nil
}

// Bytes is the approximate memory of a reply while it is sent.
func (r *Reply) Bytes() int {
	n := len(r.Stats) + 512*len(r.Aliases)
	for i := range r.Models {
		m := &r.Models[i]
		n += 256 + 64*len(m.Policy)
	}
	return n
}

// ReceiveReply reads all frames of a reply. The caller closes the descriptors, even if
// ReceiveReply returns an error.
func ReceiveReply(c *net.UnixConn, deadline time.Time, rep *Reply) (fds []int, err error) {
	fds, err = Receive(c, deadline, rep)
	for parts := 1; err == nil && rep.More; parts++ {
		if parts == maxParts {
			return fds, fmt.Errorf("%w: a reply of more than %d frames", ErrFrame, maxParts)
		}
		var next Reply
		more, nextErr := Receive(c, deadline, &next)
		CloseFDs(more)
		if len(more) > 0 {
			nextErr = errors.Join(nextErr, fmt.Errorf("%w: descriptors with a later frame", ErrFrame))
		}
		if err = nextErr; err == nil {
			rep.Models = append(rep.Models, next.Models...)
			rep.Stats = append(rep.Stats, next.Stats...)
			rep.More = next.More
		}
	}
	return fds, err
}
