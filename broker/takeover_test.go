// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/status"
)

// takeOverUntil takes a socket over as Broker.takeOver does, and is killed after a step.
func takeOverUntil(socket, step string) {
	l, err := listenBeside(socket, false)
	for _, s := range []struct {
		name string
		take func() error
	}{
		{"listens beside", func() error { return err }},
		{"asked", func() error { return admin.New(socket).HandOver(context.Background()) }},
		{"locked", l.takeLock},
		{"linked", func() error { return os.Link(l.beside, l.beside+"+") }},
	} {
		if err := s.take(); err != nil {
			fmt.Println(s.name, err)
			os.Exit(3)
		}
		if s.name == step {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
	}
}

func TestABrokerGoesOnIfItsSuccessorDiesBeforeItHasTheSocket(t *testing.T) {
	s := serve(t, nil)
	socket := s.b.Socket()
	for _, step := range []string{"listens beside", "asked", "locked", "linked"} {
		child := exec.Command(worker().Command[0], socket, step)
		child.Env = append(os.Environ(), roleEnv+"=successor")
		out, err := child.CombinedOutput()
		if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("%s: the successor was to be killed: %v %s", step, err, out)
		}
		s.until(step+": the broker has its lock again", func(stats.Broker) bool { return !s.b.handing.Load() })
		if st, err := admin.New(socket).Stats(t.Context()); err != nil || st.Pid != os.Getpid() {
			t.Errorf("%s: stats of %d, %v", step, st.Pid, err)
		}
		if s.b.models.isDraining() {
			t.Errorf("%s: it drains", step)
		}
		if _, err := listen(socket, false); !errors.Is(err, status.ErrBrokerRunning) {
			t.Errorf("%s: another one may have the socket: %v", step, err)
		}
	}
	next := serve(t, func(c *Config) {
		c.Socket, c.TakeOver = socket, func(ctx context.Context) error { return admin.New(socket).HandOver(ctx) }
	})
	if err := <-s.served; err != nil { // a successor that lives takes the socket
		t.Error(err)
	}
	s.served <- nil
	next.end()
	if left, _ := filepath.Glob(filepath.Dir(socket) + "/*"); len(left) > 0 {
		t.Errorf("left behind: %s", strings.Join(left, " "))
	}
}

// The broker does not know of a successor that is killed before it asks for the socket.
func TestABrokerThatEndsRemovesTheSocketOfAKilledSuccessor(t *testing.T) {
	s := serve(t, nil)
	child := exec.Command(worker().Command[0], s.b.Socket(), "listens beside")
	child.Env = append(os.Environ(), roleEnv+"=successor")
	if err := child.Run(); err == nil {
		t.Fatal("the successor was to be killed")
	}
	if left, _ := filepath.Glob(s.b.Socket() + ".[0-9]*"); len(left) != 1 {
		t.Fatalf("the successor has left %s", left)
	}
	s.end()
	if left, _ := filepath.Glob(filepath.Dir(s.b.Socket()) + "/*"); len(left) > 0 {
		t.Errorf("left behind: %s", strings.Join(left, " "))
	}
}

func TestABrokerGoesOnIfItsSuccessorTakesTooLong(t *testing.T) {
	s := serve(t, func(c *Config) { c.replaceTime = time.Millisecond })
	var again error
	next := serve(t, func(c *Config) {
		c.Socket = s.b.Socket()
		c.TakeOver = func(ctx context.Context) error {
			err := admin.New(c.Socket).HandOver(ctx)
			s.until("the broker has its lock again", func(stats.Broker) bool { return !s.b.handing.Load() })
			again = admin.New(c.Socket + "." + strconv.Itoa(os.Getpid())).HandOver(ctx)
			return err
		}
	})
	if err := <-next.served; !errors.Is(err, status.ErrBrokerRunning) {
		t.Errorf("the successor that was late: %v", err)
	}
	next.served <- nil
	if !errors.Is(again, status.ErrInvalid) {
		t.Errorf("a broker without the socket was asked for it: %v", again)
	}
	if st, err := admin.New(s.b.Socket()).Stats(t.Context()); err != nil || st.Draining {
		t.Errorf("%v, it drains: %v", err, st.Draining)
	}
}
