package client

import (
	"fmt"
	"math/bits"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Notifier tells an event loop that requests have ended: its descriptor
// becomes readable, and Reap says which. One goroutine (the reaper) parks on
// the bell for it, however many requests are watched.
//
//  1. Request.Notify, before Commit, puts the request on the watch list
//  2. the worker ends it and rings the window's bell
//  3. the reaper wakes, finds it ended and makes the descriptor readable
//  4. the event loop calls Reap, which takes it off the list
type Notifier struct {
	client *Client

	mu     sync.Mutex
	fd     int
	closed bool
}

// watching is the part of a link that its notifier needs; under link.mu.
type watching struct {
	notifier *Notifier
	watched  []uint64 // bitmap of slots
	count    int
}

// Notifier gives the client's notifier, making it on first use. It is closed
// with the client.
func (c *Client) Notifier() (*Notifier, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return nil, c.err
	}
	if n := c.notifier.Load(); n != nil {
		return n, nil
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("notifier: %w", err)
	}
	n := &Notifier{client: c, fd: fd}
	c.notifier.Store(n)
	if c.link != nil {
		c.link.startReaper(n)
	}
	return n, nil
}

// FD is an eventfd that is readable when requests have ended. Only Reap
// should read from it.
func (n *Notifier) FD() int { return n.fd }

// Reap appends the watched requests that have ended to ids, as far as its
// capacity goes. Each is told once. If more are left, FD stays readable.
func (n *Notifier) Reap(ids []uint64) []uint64 {
	n.quiet()
	for _, l := range *n.client.links.Load() {
		if ids = l.reapWatched(ids); len(ids) == cap(ids) {
			n.ring()
			break
		}
	}
	return ids
}

// Notify makes the request's end known through the client's Notifier. Before
// Commit; there must be a notifier.
func (r Request) Notify() error {
	s, err := r.slot()
	if err != nil {
		return err
	}
	if s.state != slotClaimed {
		return status.ErrCommitted
	}
	r.link.mu.Lock()
	defer r.link.mu.Unlock()
	if r.link.notify.notifier == nil {
		return fmt.Errorf("%w: this client has no notifier", status.ErrInvalid)
	}
	s.notify = true
	return nil
}

func (n *Notifier) ring() { n.use(func() { shm.Doorbell(n.fd).Ring() }) }

func (n *Notifier) quiet() {
	n.use(func() {
		var b [8]byte
		_, _ = unix.Read(n.fd, b[:])
	})
}

// use keeps the descriptor open meanwhile: its number may be somebody else's
// once it is closed.
func (n *Notifier) use(f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.closed {
		f()
	}
}

func (n *Notifier) close() {
	n.use(func() {
		n.closed = true
		_ = unix.Close(n.fd)
	})
}

// startReaper gives the link a leader that stays.
func (l *link) startReaper(n *Notifier) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.notify.notifier != nil {
		return
	}
	l.notify.notifier = n
	l.notify.watched = make([]uint64, len(l.free))
	l.hold()
	go l.reap()
}

// reap leads for as long as the link lives. Like any leader it looks at the
// board by itself too (see waiting.go): soon, and then each time after twice
// as long again. While nothing is under way it leaves the bell and sleeps
// where no other process can reach it: there a thief could keep it from
// hearing that something is.
func (l *link) reap() {
	defer l.drop()
	l.takeLead()
	defer l.resign()
	slice := leastSlice
	for !l.dead.Load() {
		seen := l.bell.Count.Load()
		l.wakeEnded()
		if idle := l.nothingToReap(slice); idle != nil {
			<-idle
			slice = l.firstSlice()
			continue
		}
		slice = min(slice, mostSlice)
		parked := shm.Now()
		l.wait.parked.Add(1)
		if !l.dead.Load() { // as in lead
			l.bell.Wait(&l.wait.parker, seen, slice)
		}
		l.wait.parked.Add(1)
		now := shm.Now()
		l.woke.Store(now)
		switch slept := now-parked >= int64(slice); {
		case slept && l.bell.Count.Load() == seen: // nobody rang
			slice *= 2
		default:
			if slept && l.stolen(parked, now) {
				l.wait.robbed = robbedFor
			}
			slice = l.firstSlice()
		}
	}
}

// firstSlice is how long the reaper parks when it expects an end.
func (l *link) firstSlice() time.Duration {
	if l.wait.robbed > 0 {
		l.wait.robbed--
		return robbedSlice
	}
	return leastSlice
}

// nothingToReap gives the channel to sleep on if nothing is under way, and was
// not for as long as it takes to park once: under load it is not worth it.
func (l *link) nothingToReap(slice time.Duration) chan struct{} {
	if slice == leastSlice || slice == robbedSlice {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.notify.count+l.wait.count > 0 || l.dead.Load() {
		return nil
	}
	l.wait.idle = make(chan struct{})
	return l.wait.idle
}

// wakeReaper ends the reaper's idleness: there is something to wait for, or
// nothing any more. The caller holds mu.
func (l *link) wakeReaper() {
	if l.wait.idle != nil {
		close(l.wait.idle)
		l.wait.idle = nil
	}
}

// stolen reports whether a request that somebody waits for ended well after
// the reaper went to sleep, and well before it woke by itself.
func (l *link) stolen(parked, now int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k := range l.notify.watched {
		for word := l.notify.watched[k] | l.wait.follow[k]; word != 0; word &= word - 1 {
			i := uint32(k*64 + bits.TrailingZeros64(word))
			w := l.board.Word(l.first + i)
			if w.Generation() != l.gens[i] || w.Status() != status.OK { // only an answer's record is final
				continue
			}
			if end := l.board.Record(l.first + i).Finished; end > parked && now-end > int64(stolenAfter) {
				return true
			}
		}
	}
	return false
}

// takeLead waits for the leader of the moment to resign.
func (l *link) takeLead() {
	for {
		l.mu.Lock()
		if !l.wait.leading {
			l.wait.leading = true
			l.mu.Unlock()
			return
		}
		turn := make(chan struct{})
		l.wait.reaper = turn
		l.mu.Unlock()
		<-turn
	}
}

// tellNotifier rings if a watched request has ended. The caller holds mu.
func (l *link) tellNotifier() {
	if l.notify.count == 0 {
		return
	}
	for w, word := range l.notify.watched {
		for ; word != 0; word &= word - 1 {
			if l.over(uint32(w*64 + bits.TrailingZeros64(word))) {
				l.notify.notifier.ring()
				return
			}
		}
	}
}

// tellNotifierAll rings because the link is dead.
func (l *link) tellNotifierAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.notify.count > 0 {
		l.notify.notifier.ring()
	}
}

func (l *link) reapWatched(ids []uint64) []uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.notify.count == 0 {
		return ids
	}
	for w, word := range l.notify.watched {
		for ; word != 0; word &= word - 1 {
			i := uint32(w*64 + bits.TrailingZeros64(word))
			if !l.over(i) {
				continue
			}
			if len(ids) == cap(ids) {
				return ids
			}
			l.unwatch(i)
			ids = append(ids, Request{l, i, l.slots[i].handle.Load()}.ID())
		}
	}
	return ids
}

// over is whether nobody will answer the watched request in slot i any more.
// Unlike ended it leaves the slot's books alone: they belong to the one who waits.
func (l *link) over(i uint32) bool {
	return l.board.Word(l.first+i).Generation() == l.gens[i] || l.dead.Load()
}

// watch puts slot i on the list. The caller holds mu and commits it now.
func (l *link) watch(i uint32) {
	l.notify.watched[i/64] |= 1 << (i % 64)
	l.notify.count++
	l.wakeReaper()
}

// unwatch takes slot i off the list. The caller holds mu.
func (l *link) unwatch(i uint32) {
	if w := &l.notify; w.count > 0 && w.watched[i/64]&(1<<(i%64)) != 0 {
		w.watched[i/64] &^= 1 << (i % 64)
		w.count--
	}
}
