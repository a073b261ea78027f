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

// parent has a child of its own.
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

func start(t *testing.T, b *Bed, s Spec) *Process {
	t.Helper()
	p, err := b.Start(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestAProcessIsGivenItsJobAndCommandsAndAnswers(t *testing.T) {
	p := start(t, newBed(t), Spec{Role: "echo", Job: "one"})
	if err := p.Send("two"); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"one", "two"} {
		var got string
		if err := p.Expect("echo", &got, patience); err != nil || got != want {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

func TestAProcessThatFailsSaysWhy(t *testing.T) {
	b := newBed(t)
	if err := start(t, b, Spec{Role: "fail"}).Receive(nil); err == nil || !strings.Contains(err.Error(), "nothing works") {
		t.Errorf("got %v", err)
	}
	if err := start(t, b, Spec{Command: []string{"sh", "-c", "echo oh no; exit 7"}}).Receive(nil); err == nil || !strings.Contains(err.Error(), "oh no") || !strings.Contains(err.Error(), "7") {
		t.Errorf("got %v", err)
	}
}

func TestAProcessThatEndsBeforeItHasItsJobIsAnError(t *testing.T) {
	// More than a pipe holds, for one that does not read it.
	_, err := newBed(t).Start(Spec{Role: "no such role", Job: strings.Repeat("x", 1<<20)})
	if err == nil || !strings.Contains(err.Error(), "no such role") {
		t.Errorf("got %v", err)
	}
}

func TestAnInterruptEndsEveryProcess(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	b, err := New(ctx)
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, b, Spec{Role: "stay"})
	if err := p.Receive(nil); err != nil {
		t.Fatal(err)
	}
	if pids, err := Children(); err != nil || !slices.Contains(pids, p.Pid()) {
		t.Errorf("children: %v, %v", pids, err)
	}
	interrupt()
	if err := p.Receive(nil); !errors.Is(err, progress.ErrInterrupted) {
		t.Errorf("waiting for it gave %v", err)
	}
	if _, err := b.Start(Spec{Role: "stay"}); !errors.Is(err, progress.ErrInterrupted) {
		t.Errorf("starting another gave %v", err)
	}
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
	if err := p.Expect("child", &child, patience); err != nil {
		t.Fatal(err)
	}
	p.Kill()
	err := Eventually(patience, func() error {
		// A zombie is dead too: nobody may be there to reap an orphan.
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
	if err := errors.Join(essential.Receive(nil), other.Receive(nil)); err != nil {
		t.Fatal(err)
	}
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
		if err := p.Receive(nil); err != nil {
			t.Fatal(err)
		}
		p.Essential()
	}
	b.End(broker, worker)
	if err := other.Receive(nil); err != nil {
		t.Errorf("the other one: %v", err)
	}
}

func TestAProcessIsStoppedAndWokenAndEndsPolitely(t *testing.T) {
	p := start(t, newBed(t), Spec{Role: "polite"})
	if err := p.Receive(nil); err != nil {
		t.Fatal(err)
	}
	p.Signal(syscall.SIGSTOP)
	if err := p.Stop(patience); err != nil {
		t.Error(err)
	}
	if err := p.Expect("bye", nil, 0); err != nil {
		t.Error(err)
	}
}

func TestTheLatestMessageIsSeen(t *testing.T) {
	p := start(t, newBed(t), Spec{Role: "echo", Job: "1"})
	for _, text := range []string{"2", "3"} {
		if err := p.Send(text); err != nil {
			t.Fatal(err)
		}
	}
	var got string
	if err := Eventually(patience, func() error {
		if p.Latest("echo", &got); got != "3" {
			return errors.New(got)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if p.Latest("no such name", nil) {
		t.Error("a message that was never sent")
	}
}

func TestTheMachinesCPUTimeLeavesIdlingOut(t *testing.T) {
	got, err := parseMachineTime("cpu  100 10 50 9000 800 1 2 7 0 0")
	if err != nil || got != 1700*time.Millisecond {
		t.Errorf("%v, %v; want 1.7s", got, err)
	}
	for _, line := range []string{"", "cpu0 1 2 3 4 5 6 7 8", "cpu 1 2", "cpu a b c d e f g h"} {
		if _, err := parseMachineTime(line); err == nil {
			t.Errorf("%q was accepted", line)
		}
	}
}
