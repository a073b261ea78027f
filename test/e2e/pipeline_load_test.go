// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// Requests that a slow stage has not taken stay in their clients' slots. When these are
// full, claims wait.
func TestASlowStagePushesBackOnTheClients(t *testing.T) {
	t.Parallel()
	const clients, window, each = 2, 8, 20
	m := testbed.Model{Name: "m", Slots: 64, MaxBatch: 4, Wait: time.Millisecond, Lease: patience, Stages: 2}
	r := inProcess(t, m)
	goOn := make(chan struct{})
	for stage := 1; stage <= 2; stage++ {
		r.serveAs(m.StageConfig(stage, r.socket), func(_ context.Context, b *worker.Batch) error {
			if stage == 2 {
				<-goOn
			}
			return (&obedient{say: func(string) {}}).obeyAt(m, stage, b)
		})
	}
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	var all []*client.Client
	var asked sync.WaitGroup
	for range clients {
		c := r.dial(client.WithWindow(window))
		defer c.Close()
		all = append(all, c)
		for range each {
			asked.Go(func() {
				must.Check(t, ask(background(t), c, cmdAnswer, 0, 1))
			})
		}
	}
	r.eventually("the windows are full of what the second stage has to do", func() error {
		first, second := r.model("m/s1"), r.model("m/s2")
		if first.Ended["OK"] != clients*window || second.SlotsQueued+second.SlotsRunning != clients*window {
			return fmt.Errorf("the first stage ended %d, the second has %d waiting and %d running", first.Ended["OK"], second.SlotsQueued,
				second.SlotsRunning)
		}
		return nil
	})
	for _, c := range all {
		if _, err := c.TryClaim(1); !errors.Is(err, status.ErrFull) {
			t.Errorf("a client whose window is full claims: %v", err)
		}
	}
	if s := r.model("m/s1"); s.Requests != clients*window || s.SlotsQueued+s.SlotsRunning != 0 {
		t.Errorf("the first stage has seen %d requests, and has %d", s.Requests, s.SlotsQueued+s.SlotsRunning)
	}
	release()
	asked.Wait()
	for stage := 1; stage <= 2; stage++ {
		// The broker hears of an answer after the client.
		r.until("the broker has heard of every end", "m/"+m.StageName(stage),
			func(s stats.Model) bool { return s.Ended["OK"] == clients*each })
	}
	for _, c := range all {
		c.Close()
	}
	r.settled()
}

// A worker of the middle stage completes a batch that it does not have, ends words as
// the last stage would, or completes batches without computing. The first costs it its
// session. The others may spoil answers, but every request ends exactly once.
func TestAHostileWorkerOfAMiddleStageIsHeldAsAnyOther(t *testing.T) {
	h := newHost(t, thePipeline)
	h.stage(thePipeline, 1, "")
	h.stage(thePipeline, 3, "")
	for _, do := range []string{"ends", "nothing", "invents"} {
		evil := h.start(testbed.Spec{Role: "evil stage", Job: job{Socket: h.socket, Model: thePipeline, Do: do}})
		evil.expect("attached")
		c := h.dial()
		ctx := background(t)
		var all []asking
		for range 8 {
			all = append(all, askLater(ctx, c, cmdAnswer, 0))
		}
		honest := (*proc)(nil)
		if do == "invents" {
			_ = evil.end() // killed
			honest = h.stage(thePipeline, 2, "")
		}
		for _, a := range all {
			select {
			case err := <-a:
				if err != nil && !errors.Is(err, testbed.ErrWrongBytes) || do == "invents" && err != nil {
					t.Errorf("%s: %v", do, err)
				}
			case <-time.After(patience):
				t.Fatalf("%s: a request has no end", do)
			}
		}
		if do != "invents" {
			evil.Kill()
		}
		if honest == nil {
			honest = h.stage(thePipeline, 2, "")
		}
		works(t, c, 10)
		c.Close()
		honest.Signal(syscall.SIGTERM)
		_ = honest.end()
		h.until("it has left", "m/s2", func(m stats.Model) bool { return len(m.Workers) == 0 })
	}
	h.settled()
}

func playEvilStage(c *testbed.Child, j job) error {
	s, err := attach.Open(c.Context(), j.Socket, workerRequest(j.Model.Name+"/s2", j.Model.StageSignature(2)))
	if err != nil {
		return err
	}
	_ = c.Tell("attached", nil)
	box := shm.NewMailbox(s.Words, s.Info.Depth, s.Info.MaxBatch)
	done := shm.Producer[shm.Done]{Ring: shm.DoneRing(s.Words, s.Info.Depth)}
	for next := uint64(0); ; {
		if gone(s) {
			return nil
		}
		if box.Tail.Load() == next {
			time.Sleep(time.Millisecond)
			continue
		}
		mail, reqs := box.At(next)
		next++
		box.Taken.Store(next)
		for i := range int(mail.Requests) {
			if j.Do == "ends" {
				s.Board.End(reqs[i].Slot, reqs[i].Gen, status.OK, false)
				s.Board.Ring(reqs[i].Bell)
			}
		}
		d := shm.Done{Batch: mail.Batch, Started: mail.Dispatched, Finished: shm.Now()}
		if j.Do == "invents" {
			d.Batch += 1000
		}
		if ring, _ := done.Push(&d); ring {
			s.Doorbell.Ring()
		}
	}
}
