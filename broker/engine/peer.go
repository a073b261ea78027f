// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// Process identifies a process, also where its pid does not: in a PID namespace every
// peer from outside has the pid 0. The zero value is an unknown process.
type Process struct {
	Inode uint64 // of the pidfd, where each process has its own (Linux 6.9)
	Pid   int
}

// Peer is a client or worker: its process, connection and session segment.
type Peer struct {
	conn io.Closer // closed when the session ends
	Pid  int       // 0 in a PID namespace that the broker cannot see into
	Kin  []int     // of a worker: pids, one of which package supervise may have started
	UID  int
	Process
	Name  string
	since time.Time

	pidfd    int
	seg      *shm.Segment
	doorbell shm.Doorbell
	theirs   int      // the doorbell's descriptor for the peer, until it is sent
	watches  [2]int32 // doorbell, pidfd
}

// NewPeer takes the pidfd over. Without a pidfd the process's death could go unnoticed
// while a child of it keeps the connection.
func NewPeer(conn io.Closer, pid, uid int, who Process, pidfd int, name string) *Peer {
	return &Peer{
		conn: conn, Pid: pid, UID: uid, Process: who, Name: name, since: time.Now(),
		pidfd: pidfd, doorbell: -1, theirs: -1, watches: [2]int32{-1, -1},
	}
}

// Label is the peer's name, or its pid.
func (p *Peer) Label() string {
	if p.Name != "" {
		return p.Name
	}
	return fmt.Sprintf("pid %d", p.Pid)
}

// openSession makes the session segment and the doorbell, and the peer's end of it.
func (p *Peer) openSession(r *Ring, kind shm.Kind, size int64) (err error) {
	if p.seg, err = r.create("session", size); err != nil {
		return err
	}
	r.layout.WriteHeader(p.seg, kind, r.epoch)
	if p.doorbell, err = shm.NewDoorbell(); err == nil {
		if p.theirs = Dup(int(p.doorbell)); p.theirs >= 0 {
			return nil
		}
		p.doorbell.Close()
	}
	p.doorbell = -1
	p.seg.Close()
	p.seg = nil
	return ErrDescriptors
}

func (p *Peer) takeFDs() (session, doorbell int) {
	doorbell, p.theirs = p.theirs, -1
	return p.seg.TakeFD(), doorbell
}

// watchPeer has the loop call rung when the peer rings, and died when its process ends.
func (p *Peer) watchPeer(l *Loop, rung, died func()) (err error) {
	if p.watches[0], err = l.watchFD(int(p.doorbell), rung); err != nil {
		return err
	}
	if p.pidfd >= 0 && p.Pid != os.Getpid() {
		if p.watches[1], err = l.watchFD(p.pidfd, died); err != nil {
			l.unwatchFD(p.watches[0])
			p.watches[0] = -1
		}
	}
	return err
}

// Kill ends the peer's process; see Outside.Kill.
func (p *Peer) Kill() error { return p.Signal(unix.SIGKILL) }

// Signal sends the peer's process a signal; 0 only checks the permission.
func (p *Peer) Signal(number unix.Signal) error {
	if p.Pid == os.Getpid() {
		return errors.New("it is this process")
	}
	if p.pidfd < 0 {
		return errors.New("no pidfd")
	}
	err := unix.PidfdSendSignal(p.pidfd, number, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		err = nil // dead already, and reaped
	}
	return err
}

// closeSession ends the session and closes the peer's connection.
func (p *Peer) closeSession(l *Loop) {
	for i, w := range p.watches {
		l.unwatchFD(w)
		p.watches[i] = -1
	}
	_ = p.conn.Close()
	if p.seg != nil && p.seg.Size() > largeSession {
		go p.Discard() // giving back much memory takes a while
		return
	}
	p.Discard()
}

const largeSession = 1 << 20

// Discard gives back a session that no loop watches, but not the connection.
func (p *Peer) Discard() {
	if p.doorbell >= 0 {
		p.doorbell.Close()
		p.doorbell = -1
	}
	if p.seg != nil {
		p.seg.Close()
		p.seg = nil
	}
	CloseFD(p.theirs)
	CloseFD(p.pidfd)
	p.theirs, p.pidfd = -1, -1
}

// DupPidfd is another descriptor of the peer's process; -1 if there is none.
func (p *Peer) DupPidfd() int { return Dup(p.pidfd) }

// ErrDescriptors is the error of a broker that has no descriptor left for a peer.
var ErrDescriptors = fmt.Errorf("%w: the broker has none left", status.ErrNoDescriptors)

// Dup is another descriptor of an open file; -1 if there is none.
func Dup(fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return -1
	}
	return n
}

// CloseFD closes a descriptor, unless it is negative.
func CloseFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}
