// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
)

// peer is what clients and workers have in common: a process at the other end
// of a connection, and a session segment shared with it.
type peer struct {
	conn *net.UnixConn
	pid  int // 0 if it is in a PID namespace that ours is no parent of
	uid  int
	process
	name  string
	since time.Time

	pidfd    int
	seg      *shm.Segment
	doorbell shm.Doorbell
	theirs   int      // the doorbell's descriptor for the peer, until it was sent
	watches  [2]int32 // doorbell, pidfd
}

// newPeer takes the process at the other end under watch, and its pidfd over. Without a
// pidfd its death could go unnoticed while a child of it keeps the connection.
func newPeer(conn *net.UnixConn, cred *unix.Ucred, who process, pidfd int) *peer {
	return &peer{
		conn: conn, pid: int(cred.Pid), uid: int(cred.Uid), process: who, since: time.Now(),
		pidfd: pidfd, doorbell: -1, theirs: -1, watches: [2]int32{-1, -1},
	}
}

func (p *peer) label() string {
	if p.name != "" {
		return p.name
	}
	return fmt.Sprintf("pid %d", p.pid)
}

// open makes the session segment and the doorbell, and the peer's end of it.
func (p *peer) open(r *ring, kind shm.Kind, size int64) (err error) {
	if p.seg, err = r.memory.Create("session", size); err != nil {
		return err
	}
	r.layout.WriteHeader(p.seg, kind, r.epoch)
	if p.doorbell, err = shm.NewDoorbell(); err == nil {
		if p.theirs = dup(int(p.doorbell)); p.theirs >= 0 {
			return nil
		}
		p.doorbell.Close()
	}
	p.doorbell = -1
	p.seg.Close()
	p.seg = nil
	return errDescriptors
}

// takeFDs hands over the descriptors that are for the peer.
func (p *peer) takeFDs() (session, doorbell int) {
	doorbell, p.theirs = p.theirs, -1
	return p.seg.TakeFD(), doorbell
}

// watch has the loop call rung when the peer rings, and died when its process
// ends.
func (p *peer) watch(l *loop, rung, died func()) (err error) {
	if p.watches[0], err = l.watch(int(p.doorbell), rung); err != nil {
		return err
	}
	if p.pidfd >= 0 && p.pid != os.Getpid() {
		if p.watches[1], err = l.watch(p.pidfd, died); err != nil {
			l.unwatch(p.watches[0])
			p.watches[0] = -1
		}
	}
	return err
}

// kill ends the peer's process. Without an error its death is certain, but
// not yet over: the pidfd tells when.
func (p *peer) kill() error { return p.signal(unix.SIGKILL) }

// signal sends the peer's process a signal; 0 only tells whether it may be sent one.
func (p *peer) signal(number unix.Signal) error {
	if p.pid == os.Getpid() {
		return errors.New("it is this process")
	}
	if p.pidfd < 0 {
		return errors.New("no pidfd")
	}
	err := unix.PidfdSendSignal(p.pidfd, number, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		err = nil // dead already, and its parent knows
	}
	return err
}

// close gives everything of the session back. The connection's goroutine
// notices that its connection was closed.
func (p *peer) close(l *loop) {
	for i, w := range p.watches {
		l.unwatch(w)
		p.watches[i] = -1
	}
	_ = p.conn.Close()
	if p.seg != nil && p.seg.Size() > largeSession {
		go p.discard() // giving back much memory takes a while
		return
	}
	p.discard()
}

const largeSession = 1 << 20

// discard gives back what a peer has that no loop watches; not its connection,
// which a refusal needs.
func (p *peer) discard() {
	if p.doorbell >= 0 {
		p.doorbell.Close()
		p.doorbell = -1
	}
	if p.seg != nil {
		p.seg.Close()
		p.seg = nil
	}
	closeFD(p.theirs)
	closeFD(p.pidfd)
	p.theirs, p.pidfd = -1, -1
}

func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}
