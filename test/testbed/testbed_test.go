// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/progress"
)

const patience = 2 * time.Minute

func TestMain(m *testing.M) {
	Play(Roles{
		"stay":   func(c *Child) error { _ = c.Ready(); select {} },
		"fail":   func(*Child) error { return errors.New("nothing works") },
		"echo":   With(echo),
		"parent": parent,
		"polite": func(c *Child) error { _ = c.Ready(); <-c.Context().Done(); return c.Tell("bye", nil) },
	})
	os.Exit(m.Run())
}

// echo gives its job and then every command back.
func echo(c *Child, text string) error {
	for {
		_ = c.Tell("echo", text)
		if err := c.Next(&text); err != nil {
			return err
		}
	}
}

// parent starts a child.
func parent(c *Child) error {
	b, err := New(context.Background())
	if err != nil {
		return err
	}
	p, err := b.Start(Spec{Role: "stay"})
	if err != nil {
		return err
	}
	_ = os.RemoveAll(b.Dir)
	_ = c.Tell("child", p.Pid())
	select {}
}

func newBed(t *testing.T) *Bed {
	t.Helper()
	b, err := New(t.Context())
	must.Do(t, err)
	t.Cleanup(b.Close)
	return b
}

func start(t *testing.T, b *Bed, s Spec) *Process {
	t.Helper()
	p, err := b.Start(s)
	must.Do(t, err)
	return p
}

func TestAProcessIsGivenItsJobAndCommandsAndAnswers(t *testing.T) {
	p := start(t, newBed(t), Spec{Role: "echo", Job: "one"})
	must.Do(t, p.Send("two"))
	for _, want := range []string{"one", "two"} {
		var got string
		if err := p.Expect("echo", &got, patience); err != nil || got != want {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

func TestAProcessThatFailsSaysWhy(t *testing.T) {
	b := newBed(t)
	for _, c := range []struct {
		spec Spec
		says []string
	}{
		{Spec{Role: "fail"}, []string{"nothing works"}},
		{Spec{Command: []string{"sh", "-c", "echo oh no; exit 7"}}, []string{"oh no", "7"}},
	} {
		err := start(t, b, c.spec).Receive(nil)
		for _, text := range c.says {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%v does not say %q", err, text)
			}
		}
	}
}

func TestAProcessThatEndsBeforeItHasItsJobIsAnError(t *testing.T) {
	// The job is longer than a pipe, and the child does not read it.
	_, err := newBed(t).Start(Spec{Role: "no such role", Job: strings.Repeat("x", 1<<20)})
	if err == nil || !strings.Contains(err.Error(), "no such role") {
		t.Errorf("got %v", err)
	}
}

func TestAnInterruptEndsEveryProcess(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	b, err := New(ctx)
	must.Do(t, err)
	p := start(t, b, Spec{Role: "stay"})
	must.Do(t, p.Receive(nil))
	if pids, err := Children(); err != nil || !slices.Contains(pids, p.Pid()) {
		t.Errorf("children: %v, %v", pids, err)
	}
	interrupt()
	must.Fail(t, "waiting for it", p.Receive(nil), progress.ErrInterrupted)
	_, err = b.Start(Spec{Role: "stay"})
	must.Fail(t, "starting another", err, progress.ErrInterrupted)
	b.Close()
	if pids, err := Children(); err != nil || len(pids) > 0 {
		t.Errorf("processes are left: %v, %v", pids, err)
	}
	if _, err := os.Stat(b.Dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}

func TestAKilledParentTakesItsProcessesWithIt(t *testing.T) {
	p := start(t, newBed(t), Spec{Role: "parent"})
	var child int
	must.Do(t, p.Expect("child", &child, patience))
	p.Kill()
	err := Eventually(patience, func() error {
		// A zombie is dead too: the orphan may have no parent that reaps it.
		if text, err := os.ReadFile("/proc/" + strconv.Itoa(child) + "/stat"); err == nil && !strings.Contains(string(text), ") Z ") {
			return errors.New("it lives")
		}
		return nil
	})
	if err != nil {
		t.Errorf("the child of a killed process: %v", err)
	}
}

func TestTheEndOfAnEssentialProcessEndsAllWithItsReason(t *testing.T) {
	b := newBed(t)
	essential, other := start(t, b, Spec{Role: "stay"}), start(t, b, Spec{Role: "stay"})
	must.Do(t, errors.Join(essential.Receive(nil), other.Receive(nil)))
	essential.Essential()
	essential.Kill()
	if err := other.Receive(nil); err == nil || !strings.Contains(err.Error(), essential.String()) {
		t.Errorf("the other one ended with %v", err)
	}
}

func TestEssentialProcessesThatAreEndedAreNoReason(t *testing.T) {
	b := newBed(t)
	broker, worker, other := start(t, b, Spec{Role: "stay"}), start(t, b, Spec{Role: "stay"}), start(t, b, Spec{Role: "echo", Job: ""})
	for _, p := range []*Process{broker, worker} {
		must.Do(t, p.Receive(nil))
		p.Essential()
	}
	b.End(broker, worker)
	must.Check(t, other.Receive(nil))
}

func TestAProcessIsStoppedAndWokenAndEndsPolitely(t *testing.T) {
	p := start(t, newBed(t), Spec{Role: "polite"})
	must.Do(t, p.Receive(nil))
	p.Signal(syscall.SIGSTOP)
	must.Check(t, p.Stop(patience))
	must.Check(t, p.Expect("bye", nil, 0))
}

func TestTheLatestMessageIsSeen(t *testing.T) {
	p := start(t, newBed(t), Spec{Role: "echo", Job: "1"})
	for _, text := range []string{"2", "3"} {
		must.Do(t, p.Send(text))
	}
	var got string
	must.Do(t, Eventually(patience, func() error {
		if p.Latest("echo", &got); got != "3" {
			return errors.New(got)
		}
		return nil
	}))
	if p.Latest("no such name", nil) {
		t.Error("a message that was never sent")
	}
}
