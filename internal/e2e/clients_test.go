package e2e

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAClientKilledAtAnyMomentLeavesNothingBehind(t *testing.T) {
	for _, stage := range []string{"attach", "claim", "write", "wait", "wait while it runs", "read"} {
		t.Run(stage, func(t *testing.T) {
			h := newHost(t, theModel)
			w := h.worker(theModel)
			other := h.dial()
			for range 3 {
				do, running := strings.CutSuffix(stage, " while it runs")
				victim := h.client(do)
				victim.expect(do)
				if running {
					w.expect("slow")
				}
				victim.kill()
				works(t, other, 4)
			}
			other.Close()
			h.settled()
			w.kill()
			h.settled()
			h.stop()
		})
	}
}

func TestAClientThatForkedAndDiedIsNoticedWhileItsChildKeepsTheConnection(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.client("fork")
	pid, err := strconv.Atoi(c.expect("forked"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}()
	c.expect("read")
	c.kill()
	h.settled()
	if _, err := os.Stat("/proc/" + strconv.Itoa(pid)); err != nil {
		t.Error("the child that should hold the connection is gone")
	}
}

func TestWhatADepartedClientHadQueuedIsCanceled(t *testing.T) {
	h := newHost(t, theModel) // no worker: everything stays queued
	leaver, stayer := h.dial(), h.dial()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var left []asking
	for range 5 {
		left = append(left, askLater(ctx, leaver, cmdAnswer, 0))
	}
	kept := askLater(ctx, stayer, cmdAnswer, 0)
	h.queued(6)
	leaver.Close()
	for _, a := range left {
		a.ends(t, client.ErrBrokerGone)
	}
	h.queued(1)
	h.worker(theModel)
	kept.ends(t, nil)
	stayer.Close()
	h.settled()
	if m := h.model("m"); m.Rows != 1 || m.Ended["Canceled"] != 5 {
		t.Errorf("%d rows reached a worker, ended %v", m.Rows, m.Ended)
	}
}

// The worker answers before it tells the broker that it is done, and the broker
// looks for that only when there is something to do. A client that has another
// slot for its next request must not seem to have two in flight meanwhile.
func TestAClientThatWaitsForEachAnswerNeverWaitsForItself(t *testing.T) {
	r := inProcess(t, shm.NewHeap(), modelSpec{Name: "m", Slots: 16, MaxBatch: 8, WaitMS: 60_000, LeaseMS: 120_000})
	r.worker(2, obey)
	c := r.dial()
	const n = 30
	var last client.Request
	for i := range n {
		req, err := c.Claim(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := req.InputBytes(0); err == nil {
			clear(b)
		}
		if err := req.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			_ = last.Release()
		}
		if err := req.WaitFor(patience); err != nil {
			t.Fatal(err)
		}
		last = req
	}
	if why := r.model("m").Reasons; why["nobody"] != n {
		t.Errorf("batches were sent because of %v", why)
	}
	_ = last.Release()
	c.Close()
	r.settled()
}

func TestARequestEndsAfterTheMostTimeOfItsLevelAlsoWhileItRuns(t *testing.T) {
	r := inProcess(t, shm.NewHeap(), modelSpec{Name: "m", Slots: 16, MaxBatch: 8, LeaseMS: 60_000})
	if err := admin.New(r.socket).Set(t.Context(), "m", map[string]string{"max_timeout": "50ms"}); err != nil {
		t.Fatal(err)
	}
	taken, through := make(chan struct{}), make(chan struct{})
	r.worker(1, func(ctx context.Context, b *worker.Batch) error {
		close(taken)
		<-through
		return obey(ctx, b)
	})
	defer close(through)
	c := r.dial()
	a := askLater(background(t), c, cmdAnswer, 0)
	select {
	case <-taken:
	case err := <-a:
		t.Skipf("this machine was too slow to run it in time: %v", err)
	}
	a.ends(t, client.ErrExpired)
	c.Close()
}

func TestAFullRingRefusesTheNextClientAndTakesItOnceThereIsRoom(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	first := h.dial(client.WithWindow(40))
	if _, err := h.tryDial(client.WithWindow(25)); !errors.Is(err, client.ErrRingFull) {
		t.Errorf("25 of 24 free slots: %v", err)
	}
	if _, err := h.tryDial(client.WithWindow(65)); !errors.Is(err, client.ErrRingFull) {
		t.Errorf("more slots than the ring has: %v", err)
	}
	second := h.dial(client.WithWindow(24))
	works(t, first, 60)
	works(t, second, 60)
	victim := start(t, role{Kind: "client", Socket: h.role.Socket, Model: theModel, Do: "read", Window: 1})
	if line := <-victim.lines; line == "read" {
		t.Error("a client got a window in a full ring")
	}
	first.Close()
	h.eventually("room again", func() error {
		c, err := h.tryDial(client.WithWindow(40))
		if err == nil {
			works(t, c, 1)
			c.Close()
		}
		return err
	})
	second.Close()
	h.settled()
}
