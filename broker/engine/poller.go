// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
)

// poller waits for doorbells, deaths (pidfds), posts and time, all in one epoll set.
type poller struct {
	epfd    int
	wake    shm.Doorbell // rung by Post
	sources []source
	unused  []int32 // indices of sources to use again
	events  [128]unix.EpollEvent
	parker  shm.Parker
	spin    shm.Spin
	coarse  bool // the kernel refuses epoll_pwait2
	yields  bool // never sleeps past the Go scheduler; see shm.Parker

	mu        sync.Mutex
	posts     []func()
	morePosts bool // posts are left for the next round; only the loop uses it
	closed    bool
}

// source is a watched descriptor. The generation distinguishes its events from late
// ones of the source that had the index before.
type source struct {
	fd         int
	generation int32
	fire       func()
}

func newPoller() (*poller, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	p := &poller{epfd: epfd, spin: shm.Spin{Limit: int64(shm.LeastSpin)}}
	if p.wake, err = shm.NewDoorbell(); err != nil {
		_ = unix.Close(epfd)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	if _, err := p.watchFD(int(p.wake), func() {}); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func (p *poller) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.wake.Close()
	_ = unix.Close(p.epfd)
}

// watchFD has the loop call fire whenever fd becomes readable again (edge triggered).
func (p *poller) watchFD(fd int, fire func()) (int32, error) {
	var i int32
	if n := len(p.unused); n > 0 {
		i, p.unused = p.unused[n-1], p.unused[:n-1]
	} else {
		i = int32(len(p.sources))
		p.sources = append(p.sources, source{})
	}
	s := &p.sources[i]
	s.fd, s.fire = fd, fire
	ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&0xffffffff, Fd: i, Pad: s.generation}
	if err := unix.EpollCtl(p.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		p.unused = append(p.unused, i)
		return -1, fmt.Errorf("watch descriptor: %w", err)
	}
	return i, nil
}

// unwatchFD forgets a source. The caller closes the descriptor.
func (p *poller) unwatchFD(i int32) {
	if i < 0 {
		return
	}
	s := &p.sources[i]
	_ = unix.EpollCtl(p.epfd, unix.EPOLL_CTL_DEL, s.fd, nil)
	s.generation++
	s.fd, s.fire = -1, nil
	p.unused = append(p.unused, i)
}

// Post runs f on the loop, soon, unless the loop was closed. Any goroutine may call it.
func (p *poller) Post(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed { // another file may have the doorbell's descriptor by now
		return
	}
	p.posts = append(p.posts, f)
	if len(p.posts) == 1 {
		p.wake.Ring()
	}
}

// postsAtOnce is how many posted functions run in one round. So peers that attach at
// once wait for one another, and clients with requests do not wait for them.
const postsAtOnce = 32

func (p *poller) runPosts() {
	p.mu.Lock()
	posts := p.posts
	if p.morePosts = len(posts) > postsAtOnce; p.morePosts {
		posts, p.posts = posts[:postsAtOnce:postsAtOnce], posts[postsAtOnce:]
	} else {
		p.posts = nil
	}
	p.mu.Unlock()
	for _, f := range posts {
		f()
	}
}

// waitForEvents waits for events until the given time (shm.Now), calls woke, and fires
// the events. Before it parks it spins until spinUntil, while spinning pays.
func (p *poller) waitForEvents(until, spinUntil int64, woke func()) (err error) {
	n := 0
	if spinUntil > 0 {
		p.spin.Until(func() bool {
			n, err = p.epoll(0, true)
			return n > 0 || err != nil // epollWait below returns the error, if it persists
		}, min(until, spinUntil))
	}
	if n <= 0 {
		n, err = p.epollWait(until)
	}
	if err != nil {
		return err
	}
	if n > 0 {
		p.spin.Over()
	}
	woke()
	for _, ev := range p.events[:n] {
		if s := &p.sources[ev.Fd]; s.fire != nil && s.generation == ev.Pad {
			s.fire()
		}
	}
	return nil
}

const never = int64(1<<63 - 1)

// epollWait parks until something happens or the time has come.
func (p *poller) epollWait(until int64) (n int, err error) {
	d := time.Duration(math.MaxInt64)
	if until != never {
		d = time.Duration(max(0, until-shm.Now()))
	}
	if p.yields {
		n, err = p.epoll(d, false)
	} else {
		p.parker.Sleep(d, func(raw bool, d time.Duration) { n, err = p.epoll(d, raw) })
	}
	if errors.Is(err, unix.EINTR) {
		return 0, nil
	}
	return n, err
}

// epoll waits for at most d; raw as in shm.Parker. epoll_wait, which rounds to milliseconds,
// is for kernels before 5.11 and seccomp filters that refuse epoll_pwait2.
func (p *poller) epoll(d time.Duration, raw bool) (int, error) {
	if !p.coarse {
		n, err := epollPwait2(p.epfd, p.events[:], d, raw)
		if !errors.Is(err, unix.ENOSYS) && !errors.Is(err, unix.EPERM) {
			return n, err
		}
		p.coarse = true
		slog.Warn("the kernel refuses epoll_pwait2: wait times are rounded up to milliseconds; "+
			"it needs Linux 5.11, and in a container a seccomp profile that allows it", "error", err)
	}
	ms := -1
	if d != math.MaxInt64 {
		ms = int(min((int64(d)+999_999)/1_000_000, math.MaxInt32))
	}
	n, err := unix.EpollWait(p.epfd, p.events[:], ms)
	if err != nil {
		return 0, fmt.Errorf("epoll_wait: %w", err)
	}
	return n, nil
}

func epollPwait2(epfd int, events []unix.EpollEvent, d time.Duration, raw bool) (int, error) {
	var ts *unix.Timespec
	if d != math.MaxInt64 {
		t := unix.NsecToTimespec(int64(d))
		ts = &t
	}
	var n uintptr
	var e unix.Errno
	if raw {
		n, _, e = unix.RawSyscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd),
			uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(unsafe.Pointer(ts)), 0, 0)
	} else {
		n, _, e = unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd),
			uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(unsafe.Pointer(ts)), 0, 0)
	}
	if e != 0 {
		return 0, fmt.Errorf("epoll_pwait2: %w", e)
	}
	return int(n), nil
}
