// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// playLeaver attaches, has a child inherit the connection, ends its session in
// good order, and lives on.
func playLeaver(c *testbed.Child, j job) error {
	ctx := c.Context()
	var leave func()
	switch j.Do {
	case "worker":
		w, err := worker.Attach(ctx, j.Model.WorkerConfig(j.Socket))
		if err != nil {
			return err
		}
		leave = w.Close
	case "client":
		conn, err := client.Dial(ctx, j.Model.Name, client.WithSocket(j.Socket))
		if err != nil {
			return err
		}
		leave = func() { conn.Close() }
	case "canceled": // it gives up while it attaches
		conn, err := attach.Dial(ctx, j.Socket)
		if err != nil {
			return err
		}
		giving, up := context.WithCancel(ctx)
		go func() {
			_, fds, _ := attach.Call(giving, conn, &control.Request{Op: control.OpWatch})
			control.CloseFDs(fds)
		}()
		leave = up
	}
	pid, err := forkSleeper()
	if err != nil {
		return err
	}
	_ = c.Tell("forked", pid)
	if err := c.Next(&struct{}{}); err != nil {
		return err
	}
	leave()
	return stay(c, "left")
}

// playQuitter takes a batch, hangs up with it, and dies a moment later.
func playQuitter(c *testbed.Child, j job) error {
	sig := j.Model.Signature()
	s, err := attach.Open(c.Context(), j.Socket, shm.Memfd{}, &control.Request{Op: control.OpWorker, Model: j.Model.Name,
		Worker: &control.WorkerInfo{Inputs: tensor.SpecTexts(sig.Inputs), Outputs: tensor.SpecTexts(sig.Outputs), Depth: 1}})
	if err != nil {
		return err
	}
	_ = c.Ready()
	box := shm.NewMailbox(s.Words, 1, s.Info.MaxBatch)
	for box.Tail.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	box.Taken.Store(1)
	_ = c.Tell("taken", nil)
	s.HangUp()
	if j.Do == "and lives on" {
		return stay(c, "hung up")
	}
	time.Sleep(100 * time.Millisecond)
	return nil
}

func TestASessionEndsByItsOwnWordThoughAChildKeepsTheConnection(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.dial()
	for _, who := range []string{"worker", "client", "canceled"} {
		before := h.model("m")
		p := h.start(testbed.Spec{Role: "leaver", Job: job{Socket: h.socket, Model: theModel, Do: who}})
		var child int
		must.Do(t, p.Expect("forked", &child, patience))
		must.Do(t, p.Send(struct{}{}))
		p.expect("left")
		h.until("the "+who+" is gone", "m", func(m stats.Model) bool {
			return len(m.Workers) == len(before.Workers) && m.Clients == before.Clients && m.SlotsFree == before.SlotsFree
		})
		works(t, c, 10) // nothing went to a ghost
		if err := syscall.Kill(child, 0); err != nil {
			t.Errorf("the child that keeps the connection: %v", err)
		}
		_ = syscall.Kill(child, syscall.SIGKILL)
		p.Kill()
	}
	c.Close()
	h.settled()
}

// strangers runs the broker as one user and lets another in.
func strangers(t *testing.T, models ...testbed.Model) (h *host, user int) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to become somebody else")
	}
	const owner, other = 54320, 54321
	h = idleHost(t, models...)
	must.Do(t, os.Chmod(h.bed.Dir, 0o755))
	must.Do(t, os.Chown(h.bed.Dir, owner, owner))
	h.uid = owner
	h.job.OpenFolder = true
	return h, other
}

// A worker of another user cannot be killed. That it hung up may be the first
// that is seen of its death, and then its batch is another worker's.
func TestTheBatchOfADeadWorkerOfAnotherUserIsRunAgain(t *testing.T) {
	m := theModel
	m.MaxBatch = 1
	h, other := strangers(t, m)
	h.job.Grants = []broker.Grant{{UIDs: []int{0, other}, May: broker.MayInfer | broker.MayServe}}
	h.startBroker()
	quitter := h.start(testbed.Spec{Role: "quitter", Job: job{Socket: h.socket, Model: m}, UID: other})
	quitter.expect("ready")
	c := h.dial()
	asked := askLater(background(t), c, cmdAnswer, 0)
	quitter.expect("taken")
	h.worker(m)
	asked.ends(t, nil)
	works(t, c, 5)

	lives := h.start(testbed.Spec{Role: "quitter", Job: job{Socket: h.socket, Model: m, Do: "and lives on"}, UID: other})
	lives.expect("ready")
	// It is idle, so it gets one of the next.
	var all []asking
	for range 8 {
		all = append(all, askLater(background(t), c, cmdAnswer, 0))
	}
	lives.expect("hung up")
	hung := 0
	for _, a := range all {
		if err := <-a; err != nil {
			hung++
		}
	}
	if hung == 0 {
		t.Error("a worker that may still write lost its batch to another")
	}
	lives.Kill() // its slots come back
	c.Close()
	h.settled()
}

func TestALeaseIsNotProlongedByBatchesThatCameAfter(t *testing.T) {
	m := theModel
	m.MaxBatch, m.Lease = 1, time.Second
	h := newHost(t, m)
	for range 2 { // kept: one that is not scheduled for a second is killed, too
		defer h.keepWorker(job{Model: m, AtOnce: 3})()
	}
	c := h.dial(client.WithWindow(8))
	hung := askLater(background(t), c, cmdHang, 0)
	ctx, stop := context.WithCancel(background(t))
	var busy sync.WaitGroup
	for range 4 {
		busy.Go(func() {
			for ctx.Err() == nil {
				x := make([]int64, testbed.Width)
				x[0] = 1 << 40
				_ = testbed.Ask(ctx, c, x, testbed.Width)
			}
		})
	}
	hung.ends(t, client.ErrWorkerDied) // it hung both, one after the other
	stop()
	busy.Wait()
	c.Close()
	h.settled()
}
