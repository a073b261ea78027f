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
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/status"
	"golang.org/x/sys/unix"
)

// listener is the control socket, and the lock of the broker that serves it.
type listener struct {
	*net.UnixListener
	path string
	file os.FileInfo // the socket

	mu     sync.Mutex // guards lock and closed
	lock   *os.File   // nil while another broker may have it
	closed bool

	// beside is another name of the socket, for workers of a take-over.
	beside string

	// reserve is a descriptor to give up when there is no other, so that a peer can
	// still be accepted and refused. It is nil meanwhile. Only acceptConns uses it.
	reserve *os.File
}

// MaxSocketPath is the length of a Unix socket's address, less the suffix of beside.
const MaxSocketPath = 107 - len(".4194304+")

// listen takes the socket. A broker holds the lock file beside it (flock) for as long as
// it lives. So a socket whose lock is free is stale, and is taken over without a race.
func listen(path string, openFolder bool) (*listener, error) {
	l, err := listenBeside(path, openFolder)
	if err != nil {
		return nil, err
	}
	if err := l.takeSocket(false); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// listenBeside listens at another name beside path, until takeSocket. So no peer can
// connect at path before the socket's mode is right.
func listenBeside(path string, openFolder bool) (*listener, error) {
	if len(path) > MaxSocketPath {
		return nil, fmt.Errorf("%w: socket path of %d bytes, at most %d: %s", status.ErrInvalid, len(path), MaxSocketPath, path)
	}
	dir := filepath.Dir(path)
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("socket folder: %w", err)
	}
	if err := checkFolder(dir, openFolder); err != nil {
		return nil, err
	}
	beside := path + "." + strconv.Itoa(os.Getpid())
	_ = os.Remove(beside)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: beside, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	l.SetUnlinkOnClose(false)
	mode := os.FileMode(0o600)
	if openFolder {
		mode = 0o666 // the uid list decides then
	}
	ln := &listener{UnixListener: l, path: path, beside: beside}
	if err = os.Chmod(beside, mode); err == nil {
		ln.file, err = os.Lstat(beside)
	}
	if err != nil {
		ln.close()
		return nil, fmt.Errorf("listen: %w", err)
	}
	ln.refillReserve()
	return ln, nil
}

// takeSocket takes the lock and the path. over: a running broker has handed us
// its lock. We replace its socket in one step, so that the path is never empty, and keep
// our own name as well.
func (l *listener) takeSocket(over bool) error {
	if err := l.takeLock(); err != nil {
		return err
	}
	if err := l.takePath(over); err != nil {
		return err // close gives the lock back
	}
	l.removeStale()
	return nil
}

// takeLock takes the lock file beside the path, and with it the right to change the path.
func (l *listener) takeLock() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if l.closed {
			return net.ErrClosed
		}
		lock, err := os.OpenFile(l.path+".lock", os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return fmt.Errorf("socket lock: %w", err)
		}
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			pid, _ := os.ReadFile(lock.Name())
			_ = lock.Close()
			return fmt.Errorf("%w: %s (pid %s)", status.ErrBrokerRunning, l.path, strings.TrimSpace(string(pid)))
		}
		if !isFile(lock) { // a broker that ended has removed it meanwhile
			_ = lock.Close()
			continue
		}
		_ = lock.Truncate(0)
		_, _ = lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
		l.lock = lock
		return nil
	}
}

func (l *listener) giveLock() {
	l.mu.Lock()
	defer l.mu.Unlock()
	_ = l.lock.Close()
	l.lock = nil
}

// isFile says whether a file still has its name.
func isFile(f *os.File) bool {
	mine, err := f.Stat()
	named, nerr := os.Lstat(f.Name())
	return err == nil && nerr == nil && os.SameFile(mine, named)
}

// takePath puts the socket at the path. The lock is held.
func (l *listener) takePath(over bool) error {
	if st, err := os.Lstat(l.path); err == nil {
		if st.Mode().Type() != os.ModeSocket {
			return fmt.Errorf("%w: %s exists and is not a socket", status.ErrInvalid, l.path)
		}
		if !over && socketAnswers(l.path) {
			return fmt.Errorf("%w: another program answers on %s", status.ErrBrokerRunning, l.path)
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("socket: %w", err)
	}
	tmp, err := l.beside, error(nil)
	if over {
		tmp += "+"
		_ = os.Remove(tmp)
		err = os.Link(l.beside, tmp)
	}
	if err == nil {
		err = os.Rename(tmp, l.path) // over the stale one
	}
	if err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("listen: %w", err)
	}
	return nil
}

// removeStale removes sockets that killed brokers have left. The lock is held.
func (l *listener) removeStale() {
	names, _ := filepath.Glob(l.path + ".[0-9]*")
	for _, name := range names {
		pid, err := strconv.Atoi(strings.TrimSuffix(name[len(l.path)+1:], "+"))
		st, serr := os.Lstat(name)
		if err != nil || serr != nil || st.Mode().Type() != os.ModeSocket || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		// The process may live in another PID namespace.
		if c, err := net.DialTimeout("unix", name, time.Second); err == nil {
			_ = c.Close()
		} else if errors.Is(err, unix.ECONNREFUSED) {
			_ = os.Remove(name)
		}
	}
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

// socketAnswers says whether a socket is in use though its lock is free: by another
// program, or by a broker whose lock file was removed. It tries several times, since the
// kernel closes the lock of a killed broker before its other descriptors.
func socketAnswers(path string) bool {
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

// checkFolder refuses a folder in which other users could make a socket, or reach ours.
func checkFolder(dir string, open bool) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("socket folder: %w", err)
	}
	if int(st.Uid) != os.Getuid() && st.Uid != 0 {
		return fmt.Errorf("%w: socket folder %s belongs to uid %d; choose another with --socket", status.ErrForbidden, dir, st.Uid)
	}
	if st.Mode&0o077 != 0 && !open {
		return fmt.Errorf("%w: socket folder %s has mode %04o, so others may reach it; chmod 700 it, "+
			"choose another with --socket, or allow it with --open-folder", status.ErrForbidden, dir, st.Mode&0o7777)
	}
	return nil
}

func (l *listener) isTaken() bool {
	st, err := os.Lstat(l.path)
	return err == nil && !os.SameFile(st, l.file)
}

// close ends the listener, and removes its files. The lock file goes last, while the lock
// is held; takeLock checks for that.
func (l *listener) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	if l.lock != nil {
		if !l.isTaken() { // it is if a tool removed socket and lock, and another broker came
			_ = os.Remove(l.path)
		}
		l.removeStale()
	}
	_ = os.Remove(l.beside)
	_ = l.UnixListener.Close()
	if l.lock != nil {
		if isFile(l.lock) {
			_ = os.Remove(l.lock.Name())
		}
		_ = l.lock.Close()
		l.lock = nil
	}
}

func peerCred(c *net.UnixConn) (cred *unix.Ucred, err error) {
	err = withFD(c, func(fd int) (err error) {
		cred, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	})
	return cred, err
}
