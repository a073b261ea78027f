// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

// connectThirdDescriptor connects a socket that it shares with the test, and ends with its
// standard input.
func connectThirdDescriptor(socket string) {
	if err := unix.Connect(3, &unix.SockaddrUnix{Name: socket}); err != nil {
		fmt.Println(err)
		os.Exit(3)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// connectAsChild is a connection whose peer is a child process, until end has ended it.
func connectAsChild(t *testing.T, socket string) (conn *net.UnixConn, pid int, end func()) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must.Do(t, err)
	shared := os.NewFile(uintptr(fd), "shared")
	defer shared.Close()
	child := exec.Command(worker().Command[0], socket)
	child.Env, child.ExtraFiles = append(os.Environ(), roleEnv+"=connector"), []*os.File{shared}
	in, err := child.StdinPipe()
	if err == nil {
		err = child.Start()
	}
	must.Do(t, err)
	end = func() { _ = in.Close(); _ = child.Wait() }
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if _, err := unix.Getpeername(fd); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it does not connect")
		}
	}
	c, err := net.FileConn(shared)
	must.Do(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c.(*net.UnixConn), child.Process.Pid, end
}

// startAs starts a process that gets this pid, which must be free.
func startAs(t *testing.T, pid int) *exec.Cmd {
	t.Helper()
	for range 200 {
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0); err != nil {
			t.Skipf("pids cannot be chosen here: %v", err)
		}
		cmd := exec.Command("sleep", "1000")
		must.Do(t, cmd.Start())
		if cmd.Process.Pid == pid {
			return cmd
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Skip("others are quicker to take the pid")
	return nil
}

// A peer whose number is another process's by the time that it attaches is dead.
func TestAPeerIsTheProcessThatConnectedNotOneThatHasItsNumberNow(t *testing.T) {
	s := serve(t, func(c *Config) { c.noPeerPidfd = true })
	conn, pid, end := connectAsChild(t, s.b.Socket())
	deadline := time.Now().Add(10 * time.Second)
	var rep control.Reply
	must.Do(t, control.Send(conn, deadline, &control.Request{Version: control.Version, Op: control.OpPing}))
	if _, err := control.ReceiveReply(conn, deadline, &rep); err != nil {
		t.Fatal(err)
	}
	end()
	other := startAs(t, pid)
	defer func() { _ = other.Process.Kill(); _ = other.Wait() }()
	err := control.Send(conn, deadline, &control.Request{Version: control.Version, Op: control.OpWorker, Model: "m",
		Worker: &control.WorkerInfo{Inputs: []string{"x:f32[4]"}, Outputs: []string{"y:f32[4]"}, Depth: 1}})
	must.Do(t, err)
	_ = conn.SetReadDeadline(deadline)
	if _, err := io.Copy(io.Discard, conn); err != nil {
		t.Errorf("the broker takes the other process for its peer: %v\n%s", err, s.log)
	}
}

func TestAProcessOfAnotherUserIsNoPeer(t *testing.T) {
	own := &unix.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Geteuid())}
	fd, err := openPidfd(own)
	must.Do(t, err)
	engine.CloseFD(fd)
	if _, err := openPidfd(&unix.Ucred{Pid: own.Pid, Uid: own.Uid + 1}); !errors.Is(err, status.ErrForbidden) {
		t.Errorf("a process of another user: %v", err)
	}
	child := exec.Command("true")
	must.Do(t, child.Start())
	dead := child.Process.Pid
	must.Do(t, unix.Waitid(unix.P_PID, dead, nil, unix.WEXITED|unix.WNOWAIT, nil))
	if _, err := openPidfd(&unix.Ucred{Pid: int32(dead), Uid: own.Uid}); !errors.Is(err, unix.ESRCH) {
		t.Errorf("a dead process: %v", err)
	}
	_ = child.Wait()
}
