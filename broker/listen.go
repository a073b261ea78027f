// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/status"
	"golang.org/x/sys/unix"
)

// listener is the control socket, and the lock that says who serves it.
type listener struct {
	*net.UnixListener
	lock *os.File
	path string
	file os.FileInfo // the socket at path

	// reserve is a descriptor to give up when there is no other: with it a
	// peer can still be accepted, and told so. nil while it is given up. It
	// belongs to the goroutine that accepts.
	reserve *os.File
}

// MaxSocketPath is what a Unix socket's address holds, less the suffix that
// it is bound with at first.
const MaxSocketPath = 107 - len(".4194304")

// listen takes the socket. The lock file beside it is held (flock) for as
// long as its broker lives, so a socket whose lock is free is stale and can
// be taken over without a race.
func listen(path string, openFolder bool) (*listener, error) {
	if len(path) > MaxSocketPath {
		return nil, fmt.Errorf("%w: socket path of %d bytes, at most %d: %s", status.ErrInvalid, len(path), MaxSocketPath, path)
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("socket folder: %w", err)
	}
	if err := checkFolder(dir, openFolder); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("socket lock: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		pid, _ := os.ReadFile(lock.Name())
		lock.Close()
		return nil, fmt.Errorf("%w: %s (pid %s)", status.ErrBrokerRunning, path, strings.TrimSpace(string(pid)))
	}
	_ = lock.Truncate(0)
	_, _ = lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	if st, err := os.Lstat(path); err == nil {
		if st.Mode().Type() != os.ModeSocket {
			lock.Close()
			return nil, fmt.Errorf("%w: %s exists and is not a socket", status.ErrInvalid, path)
		}
		if answers(path) {
			lock.Close()
			return nil, fmt.Errorf("%w: somebody answers on %s", status.ErrBrokerRunning, path)
		}
		_ = os.Remove(path) // stale: its broker's lock was free
	} else if !errors.Is(err, os.ErrNotExist) {
		lock.Close()
		return nil, fmt.Errorf("socket: %w", err)
	}
	// Bound under another name, given its mode, then moved into place: nobody
	// can connect before the mode is right.
	tmp := path + "." + strconv.Itoa(os.Getpid())
	_ = os.Remove(tmp)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("listen: %w", err)
	}
	l.SetUnlinkOnClose(false)
	mode := os.FileMode(0o600)
	if openFolder {
		mode = 0o666 // the uid list decides then
	}
	if err := errors.Join(os.Chmod(tmp, mode), os.Rename(tmp, path)); err != nil {
		l.Close()
		_ = os.Remove(tmp)
		lock.Close()
		return nil, fmt.Errorf("listen: %w", err)
	}
	st, _ := os.Lstat(path)
	ln := &listener{UnixListener: l, lock: lock, path: path, file: st}
	ln.refillReserve()
	return ln, nil
}

func (l *listener) useReserve() {
	_ = l.reserve.Close()
	l.reserve = nil
}

func (l *listener) refillReserve() (ok bool) {
	f, err := os.Open(os.DevNull)
	if err == nil {
		l.reserve = f
	}
	return err == nil
}

// answers tells whether a socket is in use though its lock is free: by another
// program, or by a broker whose lock file was cleaned away under it. One look
// is not enough: the kernel may still be closing the descriptors of a broker
// that was killed, of which the lock was only the first.
func answers(path string) bool {
	for range 10 {
		c, err := net.DialTimeout("unix", path, time.Second)
		if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, os.ErrNotExist) {
			return false
		}
		if err == nil {
			_ = c.Close()
		}
		time.Sleep(10 * time.Millisecond)
	}
	return true
}

// checkFolder refuses a folder in which others could put a socket of their
// own, or reach ours.
func checkFolder(dir string, open bool) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("socket folder: %w", err)
	}
	if int(st.Uid) != os.Getuid() && st.Uid != 0 {
		return fmt.Errorf("%w: socket folder %s belongs to uid %d; choose another with --socket", status.ErrForbidden, dir, st.Uid)
	}
	if st.Mode&0o077 != 0 && !open {
		return fmt.Errorf("%w: socket folder %s has mode %04o, so others may reach it; chmod 700 it, choose another with --socket, or allow it with --open_folder", status.ErrForbidden, dir, st.Mode&0o7777)
	}
	return nil
}

// giveUp lets another broker have the path: nobody can connect here any more.
func (l *listener) giveUp() {
	_ = l.UnixListener.Close()
	_ = l.lock.Close()
}

func (l *listener) close() {
	// If somebody cleaned socket and lock away, another broker's may be there.
	if st, err := os.Lstat(l.path); err == nil && os.SameFile(st, l.file) {
		_ = os.Remove(l.path)
	}
	_ = l.UnixListener.Close()
	_ = l.lock.Close()
}

// peerCred asks the kernel who is at the other end.
func peerCred(c *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	return cred, errors.Join(cerr, err)
}
