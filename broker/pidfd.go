// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/status"
)

// process tells one process from another, also where their numbers do not: in
// a PID namespace every peer from outside has the number 0. The zero value
// stands for a process that cannot be told from others.
type process struct {
	inode uint64 // of its pidfd, where the kernel gives each process its own (Linux 6.9)
	pid   int
}

// pidfsMagic is the type of the file system whose inodes are processes.
const pidfsMagic = 0x50494446

// processOf is the process of a pidfd, which may be -1.
func processOf(pidfd int, cred *unix.Ucred) process {
	p := process{pid: int(cred.Pid)}
	var fs unix.Statfs_t
	var st unix.Stat_t
	if pidfd >= 0 && unix.Fstatfs(pidfd, &fs) == nil && fs.Type == pidfsMagic && unix.Fstat(pidfd, &st) == nil {
		p.inode = st.Ino
	}
	return p
}

// soPeerPidfd is SO_PEERPIDFD (Linux 6.5): the peer's pidfd without a race, and
// from any PID namespace.
const soPeerPidfd = 77

// peerPidfd is a descriptor of the process at the other end, or -1. It is called when the
// connection is accepted: later another process may have the peer's number.
func (b *Broker) peerPidfd(c *net.UnixConn, cred *unix.Ucred) (fd int, err error) {
	if b.cfg.noPeerPidfd {
		fd, err = openPidfd(cred)
	} else if fd, err = socketPidfd(c); errors.Is(err, unix.ENOPROTOOPT) {
		fd, err = openPidfd(cred)
	}
	if err != nil {
		return -1, fmt.Errorf("pidfd of process %d: %w", cred.Pid, err)
	}
	unix.CloseOnExec(fd)
	return fd, nil
}

// socketPidfd asks the socket; ENOPROTOOPT before Linux 6.5.
func socketPidfd(c *net.UnixConn) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	cerr := raw.Control(func(conn uintptr) {
		fd, err = unix.GetsockoptInt(int(conn), unix.SOL_SOCKET, soPeerPidfd)
	})
	return fd, errors.Join(cerr, err)
}

// openPidfd opens the process by its number. The peer may have ended since it connected,
// and its number may be another user's process, which the broker must never
// signal. So the process has to belong to the peer's user, and to live after that look:
// then the number still was its own.
func openPidfd(cred *unix.Ucred) (int, error) {
	if cred.Pid <= 0 {
		return -1, fmt.Errorf("%w: it is in a PID namespace that the broker cannot see into, "+
			"and this kernel has no SO_PEERPIDFD (Linux 6.5); start both in one PID namespace", status.ErrNamespace)
	}
	fd, err := unix.PidfdOpen(int(cred.Pid), 0)
	if err != nil {
		return -1, err
	}
	uid, err := userOf(int(cred.Pid))
	if err == nil && uid != int(cred.Uid) {
		err = fmt.Errorf("%w: the process belongs to uid %d, and uid %d has connected", status.ErrForbidden, uid, cred.Uid)
	}
	if err == nil && hasEnded(fd) {
		err = unix.ESRCH
	}
	if err != nil {
		closeFD(fd)
		return -1, err
	}
	return fd, nil
}

// userOf is the effective uid of a process, as SO_PEERCRED has it.
func userOf(pid int) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return -1, err
	}
	_, rest, _ := strings.Cut(string(text), "\nUid:")
	uids := strings.Fields(rest) // real, effective, …
	if len(uids) < 2 {
		return -1, fmt.Errorf("%w: /proc/%d/status has no uids", status.ErrInvalid, pid)
	}
	return strconv.Atoi(uids[1])
}

// hasEnded tells whether the process of a pidfd has.
func hasEnded(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}
