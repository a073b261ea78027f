// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"
)

// limits counts what callers have in flight. A caller is an identity (a token, a
// certificate), or else an address.
type limits struct {
	requests    int64 // of one caller
	bytes       int64 // of all callers, in the gateway's own memory
	callerBytes int64 // of one caller, of those
	used        atomic.Int64

	mu     sync.Mutex
	byName map[string]*usage
}

// usage is what one caller has in flight.
type usage struct {
	requests, bytes atomic.Int64
	connections     int // of an address; under limits.mu
}

func newLimits(cfg *Config) *limits {
	return &limits{requests: int64(cfg.CallerRequests), bytes: int64(cfg.MaxBufferedBytes), callerBytes: int64(cfg.CallerBytes), byName: map[string]*usage{}}
}

// join counts a connection of an address.
func (l *limits) join(address string) *usage {
	u := l.of(address)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byName[address] = u // another connection's end may have removed it
	u.connections++
	return u
}

// leave forgets an address with its last connection.
func (l *limits) leave(address string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if u := l.byName[address]; u != nil {
		if u.connections--; u.connections == 0 {
			delete(l.byName, address)
		}
	}
}

// of is the usage of a caller. That of an identity stays: files and authorities
// bound their number.
func (l *limits) of(name string) *usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.byName[name]
	if u == nil {
		u = &usage{}
		l.byName[name] = u
	}
	return u
}

// beginRequest counts a request, or refuses it.
func (l *limits) beginRequest(u *usage) error {
	if u.requests.Add(1) > l.requests {
		u.requests.Add(-1)
		return refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "this caller has %d requests in flight, no more are taken", l.requests)
	}
	return nil
}

func (l *limits) endRequest(u *usage) { u.requests.Add(-1) }

// takeBytes counts n more bytes of a request that has some already, or refuses them.
func (l *limits) takeBytes(u *usage, n, has int) error {
	size := int64(n)
	switch all := int64(has) + size; {
	case all > l.callerBytes: // to try again would not help
		return refuse(http.StatusRequestEntityTooLarge, codes.ResourceExhausted, "a message of %d bytes; one caller may have %d in flight", all, l.callerBytes)
	case u.bytes.Add(size) > l.callerBytes:
		u.bytes.Add(-size)
		return refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "this caller would have more than %d bytes in flight, try again", l.callerBytes)
	case l.used.Add(size) > l.bytes:
		l.giveBack(u, n)
		return refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "the gateway's buffers are full (%d MiB of requests on their way), try again", l.bytes>>20)
	}
	return nil
}

func (l *limits) giveBack(u *usage, n int) {
	u.bytes.Add(-int64(n))
	l.used.Add(-int64(n))
}

// full reports whether no more of this caller's bytes fit.
func (l *limits) full(u *usage) bool {
	return u.bytes.Load() >= l.callerBytes || l.used.Load() >= l.bytes
}

func tooLarge(n int64, most int) error {
	return refuse(http.StatusRequestEntityTooLarge, codes.ResourceExhausted, "a message of %d bytes; the gateway takes %d at most", n, most)
}

// shares divides a window among callers: a semaphore for each that has slots, or
// waits for some.
type shares struct {
	mu  sync.Mutex
	own map[*usage]*share
}

// share is one caller's part of a window.
type share struct {
	all   *shares
	owner *usage
	slots *semaphore.Weighted
	most  int
	users int // under shares.mu
}

// shareOf is how many slots of a window one caller may have: a quarter, and
// always one batch if half the window holds that.
func shareOf(window, batch int) int { return max(1, window/4, min(batch, window/2)) }

func (s *shares) of(u *usage, most int) *share {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := s.own[u]
	if own == nil {
		own = &share{all: s, owner: u, slots: semaphore.NewWeighted(int64(most)), most: most}
		if s.own == nil {
			s.own = map[*usage]*share{}
		}
		s.own[u] = own
	}
	own.users++
	return own
}

func (s *share) leave() {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.users--; s.users == 0 {
		delete(s.all.own, s.owner)
	}
}

// takeShare waits for room in the caller's share of a window, as long as a request
// waits for slots. A request that is larger than the share takes all of it.
func (c *call) takeShare(ctx context.Context, lane *lane, most int) error {
	c.giveShareBack() // of an attempt before
	own := lane.shares.of(c.caller.use, most)
	n := int64(min(c.rows, own.most))
	if !own.slots.TryAcquire(n) {
		if err := c.awaitShare(ctx, own, n); err != nil {
			own.leave()
			return err
		}
	}
	c.share, c.shareSlots = own, n
	return nil
}

func (c *call) awaitShare(ctx context.Context, own *share, n int64) error {
	if c.onWait != nil {
		defer c.onWait()
	}
	wait, cancel := context.WithTimeout(ctx, c.model.g.cfg.ClaimWait)
	defer cancel()
	err := own.slots.Acquire(wait, n)
	if err != nil && ctx.Err() == nil {
		err = refuse(http.StatusTooManyRequests, codes.ResourceExhausted,
			"this caller has %d slots of model %q in use, which is its share of the window; try again", own.most, c.model.name)
	}
	return err
}

func (c *call) giveShareBack() {
	if c.share != nil {
		c.share.slots.Release(c.shareSlots)
		c.share.leave()
		c.share = nil
	}
}
