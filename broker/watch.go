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

// changes counts how often models came or went, got their first worker, or lost their
// last. It starts at the epoch, so that counts of two brokers differ.
type changes struct {
	mu    sync.Mutex
	count uint64
	next  chan struct{} // closed at the next change; nil while no call waits for it
}

func (c *changes) noteChange() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.count++
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
}

func (c *changes) current() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.count
}

// changedSince returns a channel that is closed once the count differs from since.
func (c *changes) changedSince(since uint64) <-chan struct{} {
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

// answerWatch answers OpWatch, without the loops. It returns false if the peer sends
// something or hangs up before its answer, which ends the connection.
func (b *Broker) answerWatch(c *net.UnixConn, since uint64) bool {
	over, stop := watchPeer(c)
	timeout := time.NewTimer(control.WatchTime)
	defer timeout.Stop()
	select {
	case <-b.models.changes.changedSince(since):
	case <-timeout.C:
	case <-over:
	}
	if stop() {
		return false
	}
	rep := b.reply()
	rep.Changes = b.models.changes.current()
	return control.Send(c, time.Now().Add(replyTime), rep) == nil
}

// watchPeer watches a peer that waits for its answer: over is closed if it sends something
// or hangs up. stop ends the watch and says whether that happened.
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
