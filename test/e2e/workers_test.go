// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAWorkerRunsSeveralBatchesAtOnceAndAnotherRunsThemAllIfItIsKilled(t *testing.T) {
	const atOnce = 4
	m := theModel
	m.MaxBatch = 1
	h := newHost(t, m)
	first := h.newWorker(job{Model: m, Do: "patiently", AtOnce: atOnce})
	c := h.dial()
	var all []asking
	for range atOnce {
		all = append(all, askLater(background(t), c, cmdSlow, 1))
	}
	for range all {
		first.expect("slow") // all at once: none has ended, as no signal was sent
	}
	second := h.newWorker(job{Model: m, AtOnce: atOnce})
	second.running(h)
	first.Kill()
	for range all {
		second.expect("slow") // the same requests
	}
	for _, a := range all {
		a.ends(t, nil)
	}
	works(t, c, 20)
	c.Close()
	h.settled()
	if m := h.model("m"); m.Requeued != atOnce || m.WorkersLost != 1 {
		t.Errorf("requeued %d, lost %d workers", m.Requeued, m.WorkersLost)
	}
}

func TestRestartsAreCountedForTheWorkerThatFollowsNotForTheOneThatStays(t *testing.T) {
	h := newHost(t, theModel)
	attach := func() *proc {
		p := h.newWorker(job{Model: theModel, Name: "twin"})
		p.running(h)
		return p
	}
	stays, goes := attach(), attach()
	goes.Kill()
	h.until("one is left", "m", func(m stats.Model) bool { return len(m.Workers) == 1 })
	follows := attach()
	for p, want := range map[*proc]int{stays: 0, follows: 1} {
		if w, err := h.workerStats("m", p); err != nil || w.Restarts != want {
			t.Errorf("%+v, %v: want %d restarts", w, err, want)
		}
	}
	h.settled()
}

func TestAModelThatAWorkerDeclaredOutlivesItForItsClients(t *testing.T) {
	h := newHost(t) // no models: the worker declares it
	first := h.worker(theModel)
	c := h.dial()
	works(t, c, 3)
	first.Kill()
	waiting := askLater(background(t), c, cmdAnswer, 0)
	h.queued(1)
	second := h.worker(theModel)
	waiting.ends(t, nil)
	c.Close()
	second.Signal(syscall.SIGTERM)
	must.Check(t, second.end())
	h.eventually("the model is forgotten", func() error {
		if n := len(h.stats().Models); n != 0 {
			return fmt.Errorf("%d models", n)
		}
		return nil
	})
	h.settled()
	_, err := h.tryDial()
	must.Fail(t, "dial to a forgotten model", err, status.ErrUnknownModel)
}

func TestAWorkerThatIsToldToStopFinishesAndIsNotKilled(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.dial(client.WithWindow(32))
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var answered atomic.Int64
	for range 16 {
		wg.Go(func() {
			for ctx.Err() == nil {
				must.Check(t, ask(context.Background(), c, cmdAnswer, 0, 1))
				answered.Add(1)
			}
		})
	}
	for range 5 { // under load, where there is always a next batch
		w := h.worker(theModel)
		w.Signal(syscall.SIGTERM)
		must.Check(t, w.end())
	}
	cancel()
	h.wait(&wg)
	c.Close()
	h.settled()
	if answered.Load() == 0 {
		t.Error("nothing was answered")
	}
}

func TestAWorkerThatOutlivesItsLeaseIsKilledAndItsRequestsGoToAnother(t *testing.T) {
	m := theModel
	m.Lease = time.Second
	h := newHost(t, m)
	first := h.worker(m)
	c := h.dial()
	// The request hangs every worker. It ends with the second worker's death, sooner
	// than a request that kills its workers at once.
	hang := askLater(background(t), c, cmdHang, 0)
	for w := first; ; {
		_ = w.Expect("hanging", nil, patience) // a machine may stand still for the lease before the worker says so
		next := h.worker(m)
		if err := w.end(); err == nil {
			t.Error("a hung worker ended well")
		}
		w = next
		if len(hang) > 0 || h.model("m").WorkersHung == 2 {
			break
		}
	}
	hang.ends(t, status.ErrWorkerDied)
	h.set("lease", lease.String()) // an honest worker that is not scheduled for a while is not killed
	h.worker(m)                    // the last one may have been the second that hung
	works(t, c, 10)
	c.Close()
	h.settled()
	if m := h.model("m"); m.WorkersHung != 2 || m.Requeued != 1 {
		t.Errorf("%d workers hung, %d requests requeued", m.WorkersHung, m.Requeued)
	}
}

// A broker and a worker in one process: the broker cannot kill itself.
func TestAHungWorkerThatMayNotBeKilledIsQuarantinedUntilItIsDone(t *testing.T) {
	t.Parallel()
	r := inProcess(t, testbed.Model{Name: "m", Slots: 16, MaxBatch: 1, Lease: time.Second})
	release := make(chan struct{})
	entered := make(chan struct{}, 16)
	r.worker(2, func(ctx context.Context, b *worker.Batch) error {
		if worker.Row[int64](b.Input(0), 0)[0] == cmdHang {
			entered <- struct{}{}
			<-release
			return nil
		}
		return obey(ctx, b)
	})
	c := r.dial(client.WithWindow(4))
	ctx := background(t)
	hung := askLater(ctx, c, cmdHang, 0)
	<-entered
	hung.ends(t, status.ErrWorkerHung)
	// Its slot stays held; requests in other slots wait for a worker.
	next := askLater(ctx, c, cmdAnswer, 0)
	r.until("quarantined", "m", func(m stats.Model) bool {
		return len(m.Workers) == 1 && m.Workers[0].State == "quarantined" && m.QueueLength == 1
	})
	r.set("lease", lease.String()) // an honest worker that is not scheduled for a while is not hung
	close(release)
	next.ends(t, nil) // the worker is back
	works(t, c, 10)   // with all four slots
	c.Close()
	r.settled()
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
