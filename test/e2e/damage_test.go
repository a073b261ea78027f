// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func damage(h *host, do string, seed int64) *proc {
	return h.start(testbed.Spec{Role: "damage", Job: job{Socket: h.socket, Model: theModel, Do: do, Window: 8, Seed: seed}})
}

func TestAClientThatWritesGarbageIsThrownOutAndHarmsNobody(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.dial()
	for _, do := range []string{"scribble", "entries", "tail", "chatter"} {
		for seed := range int64(4) {
			p := damage(h, do, seed)
			works(t, c, 4) // chaos keeps more clients busy meanwhile
			p.expect("thrown out")
			if err := p.end(); err != nil {
				t.Errorf("%s: %v", do, err)
			}
		}
	}
	works(t, c, 20)
	c.Close()
	h.settled()
	if n := h.model("m").Offenders; n < 12 {
		t.Errorf("%d offenders were counted", n)
	}
}

func TestAClientThatSpoilsThePayloadSpoilsNothingElse(t *testing.T) {
	h := newHost(t, theModel)
	w := h.worker(theModel)
	before := h.dial()
	p := damage(h, "planes", 1)
	p.expect("done")
	must.Check(t, p.end())
	works(t, before, 20)
	after := h.dial() // peers do not trust the header that it overwrote
	works(t, after, 20)
	second := h.worker(theModel)
	w.Kill()
	works(t, after, 20)
	before.Close()
	after.Close()
	second.Kill()
	h.settled()
}

func TestAClientCannotWriteTheBoardOrShrinkASegment(t *testing.T) {
	h := newHost(t, theModel)
	p := damage(h, "board", 1)
	p.expect("mmap refused")
	p.expect("mprotect refused")
	p.expect("truncate refused")
	must.Check(t, p.end())
	h.settled()
}

func TestAWorkerThatWritesGarbageIsKilledAndItsRequestsGoToAnother(t *testing.T) {
	for _, do := range []string{"worker scribble", "worker entries"} {
		t.Run(do, func(t *testing.T) {
			h := newHost(t, theModel)
			c := h.dial()
			p := damage(h, do, 1)
			p.expect("attached")
			all := []asking{askLater(background(t), c, cmdAnswer, 0), askLater(background(t), c, cmdAnswer, 0)}
			h.until("it is an offender", "m", func(m stats.Model) bool { return m.Offenders > 0 })
			h.worker(theModel)
			for _, a := range all {
				a.ends(t, nil)
			}
			works(t, c, 10)
			c.Close()
			_ = p.end()
			h.settled()
		})
	}
}

func TestAModelLargerThanTheMachineIsRefused(t *testing.T) {
	huge := testbed.Model{Name: "m", Slots: 1 << 20, MaxBatch: 1, Width: 1 << 22}
	_, err := broker.New(broker.Config{Socket: t.TempDir() + "/s", OpenFolder: true, Models: []broker.ModelConfig{huge.Config()}})
	if !errors.Is(err, status.ErrNoMemory) {
		t.Errorf("declared: %v", err)
	}
	h := newHost(t)
	h.newWorker(job{Model: huge}).refused(status.ErrNoMemory)
	h.settled()
	if n := len(h.stats().Models); n != 0 {
		t.Errorf("%d models are left", n)
	}
}

// big exceeds the address space of the limited processes below.
var big = testbed.Model{Name: "m", Slots: 64, MaxBatch: 8, Wait: time.Millisecond, Lease: lease, Width: 1 << 20} // 8 MiB a row

func TestAClientThatIsRefusedTheMemorySaysSo(t *testing.T) {
	h := newHost(t, big)
	p := h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: big, Do: "read"}, Limits: testbed.Limits{AddressMiB: 700}})
	p.refused(status.ErrNoMemory)
	p.exits(1)
	h.worker(big)
	c := h.dial(client.WithWindow(2))
	if err := askSized(background(t), c, big.Width, cmdAnswer, 0, 1); err != nil {
		t.Errorf("another client: %v", err)
	}
	c.Close()
	h.settled()
}

func TestABrokerThatIsRefusedTheMemoryRefusesTheModelAndServesOthers(t *testing.T) {
	h := idleHost(t, theModel)
	h.limits.AddressMiB = 700
	h.startBroker()
	other := big
	other.Name = "big"
	h.newWorker(job{Model: other}).refused(status.ErrNoMemory)
	h.worker(theModel)
	c := h.dial()
	works(t, c, 5)
	c.Close()
	h.settled()
	h.stop()

	h.job.Models = append(h.job.Models, other)
	h.launch().refused(status.ErrNoMemory)
}
