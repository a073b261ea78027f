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

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/status"
)

// Pidfds: the broker's handles of its peers' processes.

// pidfsMagic is the type of the file system whose inodes are processes.
const pidfsMagic = 0x50494446

func processOf(pidfd int, cred *unix.Ucred) engine.Process {
	p := engine.Process{Pid: int(cred.Pid)}
	var fs unix.Statfs_t
	var st unix.Stat_t
	if pidfd >= 0 && unix.Fstatfs(pidfd, &fs) == nil && fs.Type == pidfsMagic && unix.Fstat(pidfd, &st) == nil {
		p.Inode = st.Ino
	}
	return p
}

// soPeerPidfd is SO_PEERPIDFD (Linux 6.5), which works for any PID namespace.
const soPeerPidfd = 77

// peerPidfd is a pidfd of the process at the other end, or -1. It is called when the
// connection is accepted, since later another process may have the peer's pid.
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

// socketPidfd asks the socket. Before Linux 6.5 the error is ENOPROTOOPT.
func socketPidfd(c *net.UnixConn) (pidfd int, err error) {
	err = withFD(c, func(fd int) (err error) {
		pidfd, err = unix.GetsockoptInt(fd, unix.SOL_SOCKET, soPeerPidfd)
		return err
	})
	return pidfd, err
}

// openPidfd opens the process by its pid. The peer may have ended since it connected, and
// another user's process may have its pid, which the broker must never signal. So the
// process must belong to the peer's user, and live after that check.
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
		engine.CloseFD(fd)
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

func hasEnded(pidfd int) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}

// checkKernel refuses to start where the kernel, or a seccomp filter, does not let the
// broker see the death of peers, or kill a worker that hangs.
func checkKernel() error {
	fd, err := ownPidfd()
	if err != nil {
		return fmt.Errorf("%w: pidfds are refused (%w): the broker could not tell when a peer dies; it needs pidfd_open and "+
			"pidfd_send_signal (Linux 5.3; in a container, a seccomp profile that allows them)", status.ErrInvalid, err)
	}
	defer engine.CloseFD(fd)
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
		return fmt.Errorf("%w: pidfd_send_signal is refused (%w): the broker could not kill a worker that hangs; it needs "+
			"Linux 5.1, and in a container a seccomp profile that allows it", status.ErrInvalid, err)
	}
	return nil
}

// ownPidfd is a pidfd of this process, by one of the two ways to get a peer's.
func ownPidfd() (int, error) {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		return fd, nil
	}
	pair, perr := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if perr != nil {
		return -1, errors.Join(err, perr)
	}
	defer engine.CloseFD(pair[0])
	defer engine.CloseFD(pair[1])
	if fd, serr := unix.GetsockoptInt(pair[0], unix.SOL_SOCKET, soPeerPidfd); serr == nil {
		return fd, nil
	}
	return -1, err
}
