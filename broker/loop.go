package broker

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
)

// loop is the broker's heart: one goroutine that owns all state, woken by
// doorbells (eventfds), deaths (pidfds), posted functions, and time.
type loop struct {
	epfd    int
	wake    shm.Doorbell // rung by post
	sources []source
	unused  []int32 // indices of sources to use again
	events  [128]unix.EpollEvent
	parker  shm.Parker
	spin    shm.Spin

	mu     sync.Mutex
	posts  []func()
	closed bool
}

// source is something the loop watches. Its generation tells an event of
// this source from a late one of its predecessor at the same index.
type source struct {
	fd         int
	generation int32
	fire       func()
}

func newLoop() (*loop, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	l := &loop{epfd: epfd, spin: shm.Spin{Limit: int64(shm.LeastSpin)}}
	if l.wake, err = shm.NewDoorbell(); err != nil {
		_ = unix.Close(epfd)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if _, err := l.watch(int(l.wake), func() {}); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

func (l *loop) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.wake.Close()
	_ = unix.Close(l.epfd)
}

// watch calls fire, on the loop, whenever fd becomes readable anew (edge
// triggered: an eventfd need not be read).
func (l *loop) watch(fd int, fire func()) (int32, error) {
	var i int32
	if n := len(l.unused); n > 0 {
		i, l.unused = l.unused[n-1], l.unused[:n-1]
	} else {
		i = int32(len(l.sources))
		l.sources = append(l.sources, source{})
	}
	s := &l.sources[i]
	s.fd, s.fire = fd, fire
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff, Fd: i, Pad: s.generation}
	if err := unix.EpollCtl(l.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		l.unused = append(l.unused, i)
		return -1, fmt.Errorf("watch descriptor: %w", err)
	}
	return i, nil
}

// unwatch forgets a source; its descriptor stays the caller's to close.
func (l *loop) unwatch(i int32) {
	if i < 0 {
		return
	}
	s := &l.sources[i]
	_ = unix.EpollCtl(l.epfd, unix.EPOLL_CTL_DEL, s.fd, nil)
	s.generation++
	s.fd, s.fire = -1, nil
	l.unused = append(l.unused, i)
}

// post runs f on the loop, soon. It may be called from any goroutine, also
// after the loop was closed: then nobody runs f, and the descriptor that would
// be rung may be somebody else's by now.
func (l *loop) post(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.posts = append(l.posts, f)
	if len(l.posts) == 1 {
		l.wake.Ring()
	}
}

func (l *loop) runPosts() {
	l.mu.Lock()
	posts := l.posts
	l.posts = nil
	l.mu.Unlock()
	for _, f := range posts {
		f()
	}
}

// sleep waits for events until the given time (Now's clock), calls woke, and
// fires them. Before it parks it looks out for them until lookOut, unless that
// is 0, and while looking out does find them.
func (l *loop) sleep(until, lookOut int64, woke func()) (err error) {
	n := 0
	if lookOut > 0 {
		l.spin.Until(func() bool {
			n, err = epollPwait2(l.epfd, l.events[:], 0, true)
			return n > 0 || err != nil // an error comes again below, if it is one
		}, min(until, lookOut))
	}
	if n <= 0 {
		n, err = l.epollWait(l.events[:], until)
	}
	if err != nil {
		return err
	}
	if n > 0 {
		l.spin.Over()
	}
	woke()
	for _, ev := range l.events[:n] {
		if s := &l.sources[ev.Fd]; s.fire != nil && s.generation == ev.Pad {
			s.fire()
		}
	}
	return nil
}

const never = int64(1<<63 - 1)

// epollWait is epoll_pwait2: epoll's own wait rounds to milliseconds, which
// is longer than some wait times.
func (l *loop) epollWait(events []unix.EpollEvent, until int64) (n int, err error) {
	d := time.Duration(math.MaxInt64)
	if until != never {
		d = time.Duration(max(0, until-shm.Now()))
	}
	l.parker.Sleep(d, func(raw bool, d time.Duration) { n, err = epollPwait2(l.epfd, events, d, raw) })
	switch {
	case errors.Is(err, unix.EINTR):
		return 0, nil
	case errors.Is(err, unix.ENOSYS): // kernels before 5.11
		return epollWaitMillis(l.epfd, events, until)
	}
	return n, err
}

// epollPwait2 waits for at most d; raw as in shm.Parker.
func epollPwait2(epfd int, events []unix.EpollEvent, d time.Duration, raw bool) (int, error) {
	var ts *unix.Timespec
	if d != math.MaxInt64 {
		t := unix.NsecToTimespec(int64(d))
		ts = &t
	}
	var n uintptr
	var e unix.Errno
	if raw {
		n, _, e = unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(unsafe.Pointer(ts)), 0, 0)
	} else {
		n, _, e = unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(unsafe.Pointer(ts)), 0, 0)
	}
	if e != 0 {
		return 0, fmt.Errorf("epoll_pwait2: %w", e)
	}
	return int(n), nil
}

func epollWaitMillis(epfd int, events []unix.EpollEvent, until int64) (int, error) {
	ms := -1
	if until != never {
		ms = int((max(0, until-shm.Now()) + 999_999) / 1_000_000)
	}
	n, err := unix.EpollWait(epfd, events, ms)
	if errors.Is(err, unix.EINTR) {
		return 0, nil
	}
	return n, err
}
