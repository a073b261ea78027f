// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"

	"github.com/ringbatch/ringbatch/status"
)

// limits bounds requests and bytes in flight. A caller is an identity (a token, a
// certificate), or else an address.
type limits struct {
	requests    int64 // of a caller
	bytes       int64 // of all callers, in the gateway's memory
	callerBytes int64 // of a caller
	used        atomic.Int64

	mu     sync.Mutex
	byName map[string]*Usage
}

// Usage counts a caller's requests and bytes in flight.
type Usage struct {
	requests, bytes atomic.Int64
	connections     int         // of an address; under limits.mu
	forgets         *time.Timer // runs forget; nil: does not run; under limits.mu
	standing
}

func newLimits(cfg *Config) *limits {
	return &limits{requests: int64(cfg.CallerRequests), bytes: int64(cfg.MaxBufferedBytes), callerBytes: int64(cfg.CallerBytes),
		byName: map[string]*Usage{}}
}

// join counts a connection of an address.
func (l *limits) join(address string) *Usage {
	u := l.of(address)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byName[address] = u // the end of another connection may have removed it
	u.connections++
	return u
}

// leave forgets an address with its last connection, or with its failures after that.
func (l *limits) leave(address string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if u := l.byName[address]; u != nil {
		u.connections--
		l.forget(address, u)
	}
}

// forget needs mu.
func (l *limits) forget(address string, u *Usage) {
	switch left := u.left(); {
	case u.connections > 0 || l.byName[address] != u:
	case left == 0:
		delete(l.byName, address)
	case u.forgets == nil: // a caller may end thousands of connections a second
		u.forgets = time.AfterFunc(left, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			u.forgets = nil
			l.forget(address, u)
		})
	}
}

// of returns a caller's usage. The usage of an identity stays: files and
// authorities bound their number.
func (l *limits) of(name string) *Usage {
	l.mu.Lock()
	defer l.mu.Unlock()
	u := l.byName[name]
	if u == nil {
		u = &Usage{}
		l.byName[name] = u
	}
	return u
}

func (l *limits) beginRequest(u *Usage) error {
	if u.requests.Add(1) > l.requests {
		u.requests.Add(-1)
		return Refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "this caller has %d requests in flight, no more are taken",
			l.requests)
	}
	return nil
}

func (l *limits) endRequest(u *Usage) { u.requests.Add(-1) }

// Memory counts a request's bytes in the gateway's memory as its caller's.
type Memory struct {
	limits *limits
	use    *Usage
	Taken  int
}

// NewMemory returns the count of a caller's new request. Call GiveBack at its end.
func (g *Gateway) NewMemory(who *Caller) Memory { return Memory{limits: g.Limits, use: who.Use} }

// Take counts n more bytes, or refuses them.
func (m *Memory) Take(n int) error {
	l, u, size := m.limits, m.use, int64(n)
	switch all := int64(m.Taken) + size; {
	case all > l.callerBytes: // a retry would not help
		return tooLarge("a message of %d bytes; one caller may have %d in flight", all, l.callerBytes)
	case u.bytes.Add(size) > l.callerBytes:
		u.bytes.Add(-size)
		return Refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "this caller would have more than %d bytes in flight, try again",
			l.callerBytes)
	case l.used.Add(size) > l.bytes:
		u.bytes.Add(-size)
		l.used.Add(-size)
		return Refuse(http.StatusTooManyRequests, codes.ResourceExhausted,
			"the gateway's buffers are full (%d MiB of requests on their way), try again", l.bytes>>20)
	}
	m.Taken += n
	return nil
}

// GiveBack ends the count.
func (m *Memory) GiveBack() {
	if m.Taken > 0 {
		m.use.bytes.Add(-int64(m.Taken))
		m.limits.used.Add(-int64(m.Taken))
		m.Taken = 0
	}
}

// ReadCounted appends size bytes to b, or with -1 all bytes. Memory grows, and is
// counted, as the bytes arrive.
func (m *Memory) ReadCounted(r io.Reader, b []byte, size int) ([]byte, error) {
	for size < 0 || len(b) < size {
		if len(b) == cap(b) {
			more := max(SmallBuffer, cap(b)/4)
			if size >= 0 {
				more = min(more, max(size-len(b), 4<<10))
			}
			if cap(b)+more > SmallBuffer {
				if err := m.Take(more); err != nil {
					return b, err
				}
			}
			b = slices.Grow(b, more)[: len(b) : len(b)+more]
		}
		to := b[len(b):cap(b)]
		if size >= 0 {
			to = to[:min(len(to), size-len(b))]
		}
		n, err := r.Read(to)
		b = b[:len(b)+n]
		if errors.Is(err, io.EOF) && (size < 0 || len(b) == size) {
			return b, nil
		}
		if err != nil {
			return b, bodyError(err)
		}
	}
	return b, nil
}

// Full reports whether this caller, or all together, have used up their bytes. It
// leaves room for the frames of the largest message.
func (l *limits) Full(u *Usage) bool {
	return u.bytes.Load() > l.callerBytes+l.callerBytes/64+SmallBuffer || l.used.Load() > l.bytes+l.bytes/64+SmallBuffer
}

func TooLarge(n int64, most int) error {
	return tooLarge("a message of %d bytes; the gateway takes %d at most", n, most)
}

func tooLarge(format string, args ...any) error {
	return &Refusal{Meaning: Meaning{http.StatusRequestEntityTooLarge, codes.ResourceExhausted}, code: status.ErrTooLarge,
		text: fmt.Sprintf(format, args...)}
}

// shares divides a window among callers: one semaphore for each caller that has
// slots or waits for slots.
type shares struct {
	mu  sync.Mutex
	own map[*Usage]*share
}

type share struct {
	all   *shares
	owner *Usage
	slots *semaphore.Weighted
	most  int
	users int // under shares.mu
}

// shareOf returns a caller's slots of a window: a quarter, and at least a batch if
// half the window holds it.
func shareOf(window, batch int) int { return max(1, window/4, min(batch, window/2)) }

func (s *shares) of(u *Usage, most int) *share {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := s.own[u]
	if own == nil {
		own = &share{all: s, owner: u, slots: semaphore.NewWeighted(int64(most)), most: most}
		if s.own == nil {
			s.own = map[*Usage]*share{}
		}
		s.own[u] = own
	}
	own.users++
	return own
}

// heldShare is a caller's use of some slots of its share.
type heldShare struct {
	of    *share // nil: none
	slots int64
}

func (h *heldShare) giveBack() {
	if h.of != nil {
		h.of.slots.Release(h.slots)
		h.of.leave()
		*h = heldShare{}
	}
}

func (s *share) leave() {
	s.all.mu.Lock()
	defer s.all.mu.Unlock()
	if s.users--; s.users == 0 {
		delete(s.all.own, s.owner)
	}
}

// takeShare waits for room in the caller's share of a window, at most ClaimWait. A
// request larger than the share takes all of it.
func (c *Call) takeShare(ctx context.Context, lane *lane, most int) error {
	c.share.giveBack() // of an earlier attempt
	own := lane.shares.of(c.Caller.Use, most)
	n := int64(min(c.rows, own.most))
	if !own.slots.TryAcquire(n) {
		if err := c.awaitShare(ctx, own, n); err != nil {
			own.leave()
			return err
		}
	}
	c.share = heldShare{own, n}
	return nil
}

func (c *Call) awaitShare(ctx context.Context, own *share, n int64) error {
	if c.OnWait != nil {
		defer c.OnWait()
	}
	wait, cancel := context.WithTimeout(ctx, c.Model.G.Cfg.ClaimWait)
	defer cancel()
	err := own.slots.Acquire(wait, n)
	if err != nil && ctx.Err() == nil {
		err = Refuse(http.StatusTooManyRequests, codes.ResourceExhausted,
			"this caller has %d slots of model %q in use, which is its share of the window; try again", own.most, c.Model.Name)
	}
	return err
}
