// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/status"
)

// checkKernel refuses to start where the kernel, or a filter in front of it
// (seccomp), does not let the broker tell dead peers from living ones, or kill
// a worker that hangs: its slots would stay in quarantine for ever. One look at
// the start is better than that.
func checkKernel() error {
	fd, err := ownPidfd()
	if err != nil {
		return fmt.Errorf("%w: pidfds are refused (%w): the broker could not tell when a peer dies; it needs pidfd_open and pidfd_send_signal (Linux 5.3; in a container, a seccomp profile that allows them)", status.ErrInvalid, err)
	}
	defer closeFD(fd)
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil {
		return fmt.Errorf("%w: pidfd_send_signal is refused (%w): the broker could not kill a worker that hangs; it needs Linux 5.1, and in a container a seccomp profile that allows it", status.ErrInvalid, err)
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
	defer closeFD(pair[1])
	f := os.NewFile(uintptr(pair[0]), "pair")
	defer f.Close()
	c, cerr := net.FileConn(f)
	if cerr != nil {
		return -1, errors.Join(err, cerr)
	}
	defer c.Close()
	if fd, serr := socketPidfd(c.(*net.UnixConn)); serr == nil {
		return fd, nil
	}
	return -1, err
}
