// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/stats"
	"github.com/ringbatch/ringbatch/worker"
)

// What a slow stage has not taken stays in its clients' slots: these are full
// before long, and the clients wait where they claim.
func TestASlowStagePushesBackOnTheClients(t *testing.T) {
	const clients, window, each = 2, 8, 20
	m := testbed.Model{Name: "m", Slots: 64, MaxBatch: 4, Wait: time.Millisecond, Lease: patience, Stages: 2}
	r := inProcess(t, shm.NewHeap(), m)
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
			return fmt.Errorf("the first stage ended %d, the second has %d waiting and %d running", first.Ended["OK"], second.SlotsQueued, second.SlotsRunning)
		}
		return nil
	})
	for _, c := range all {
		if _, err := c.TryClaim(1); !errors.Is(err, client.ErrFull) {
			t.Errorf("a client whose window is full claims: %v", err)
		}
	}
	if s := r.model("m/s1"); s.Requests != clients*window || s.SlotsQueued+s.SlotsRunning != 0 {
		t.Errorf("the first stage has seen %d requests, and has %d", s.Requests, s.SlotsQueued+s.SlotsRunning)
	}
	release()
	asked.Wait()
	for stage := 1; stage <= 2; stage++ {
		// Workers answer first, and tell the broker then.
		r.until("the broker has heard of every end", "m/"+m.StageName(stage), func(s stats.Model) bool { return s.Ended["OK"] == clients*each })
	}
	for _, c := range all {
		c.Close()
	}
	r.settled()
}
