// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/internal/control"
)

// changes counts how often models appeared, went, or got their first worker
// or lost their last. It starts at the epoch: a count of an earlier broker is
// never taken for one of this broker. Any goroutine may use it.
type changes struct {
	mu    sync.Mutex
	count uint64
	next  chan struct{} // closed at the next change; nil while nobody waits
}

// note counts a change.
func (c *changes) note() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
}

func (c *changes) now() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count
}

// after returns a channel that is closed once the count is another than
// since.
func (c *changes) after(since uint64) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.count != since {
		done := make(chan struct{})
		close(done)
		return done
	}
	if c.next == nil {
		c.next = make(chan struct{})
	}
	return c.next
}

// watch answers OpWatch. Waiting costs the peer one of the broker's
// connections and the loops nothing. It returns whether the connection goes
// on: a peer that speaks or hangs up before its answer ends it.
func (b *Broker) watch(c *net.UnixConn, since uint64) bool {
	over, stop := watchPeer(c)
	timeout := time.NewTimer(control.WatchTime)
	defer timeout.Stop()
	select {
	case <-b.models.changes.after(since):
	case <-timeout.C:
	case <-over:
	}
	if stop() {
		return false
	}
	rep := b.reply()
	rep.Changes = b.models.changes.now()
	return control.Send(c, time.Now().Add(replyTime), rep) == nil
}

// watchPeer watches a peer that waits for its answer: over ends when it speaks or
// hangs up, which it should not. stop ends the watch and says whether it did.
func watchPeer(c *net.UnixConn) (over <-chan struct{}, stop func() bool) {
	_ = c.SetReadDeadline(time.Time{})
	spoke, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		var one [1]byte
		if n, err := c.Read(one[:]); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			close(spoke)
		}
	}()
	return spoke, func() bool {
		_ = c.SetReadDeadline(time.Unix(1, 0)) // ends the read above
		<-ended
		select {
		case <-spoke:
			return true
		default:
			return false
		}
	}
}
