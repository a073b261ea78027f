// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

func TestAClientThatForkedAndDiedIsNoticedWhileItsChildKeepsTheConnection(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.client("fork")
	var pid int
	must.Do(t, c.Expect("forked", &pid, patience))
	defer func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}()
	c.expect("read")
	c.Kill()
	h.settled()
	if _, err := os.Stat("/proc/" + strconv.Itoa(pid)); err != nil {
		t.Error("the child that should hold the connection is gone")
	}
}

// The client sees its answer before the broker sees that the worker is done. The
// client's next request must not count as its second in flight.
func TestAClientThatWaitsForEachAnswerNeverWaitsForItself(t *testing.T) {
	t.Parallel()
	r := inProcess(t, testbed.Model{Name: "m", Slots: 16, MaxBatch: 8, Wait: time.Minute, Lease: 2 * time.Minute})
	r.worker(2, obey)
	c := r.dial()
	const n = 30
	var last client.Request
	for i := range n {
		req, err := c.Claim(t.Context(), 1)
		must.Do(t, err)
		if b, err := req.InputBytes(0); err == nil {
			clear(b)
		}
		must.Do(t, req.Commit(t.Context()))
		if i > 0 {
			_ = last.Release()
		}
		must.Do(t, testbed.WaitFor(&req, patience))
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
	t.Parallel()
	r := inProcess(t, testbed.Model{Name: "m", Slots: 16, MaxBatch: 8, Lease: time.Minute})
	release := make(chan struct{})
	r.worker(1, func(ctx context.Context, b *worker.Batch) error {
		<-release
		return obey(ctx, b)
	})
	defer close(release)
	c := r.dial()
	defer c.Close()
	for most := 50 * time.Millisecond; ; most *= 2 {
		r.set("max_timeout", most.String())
		askLater(background(t), c, cmdAnswer, 0).ends(t, status.ErrExpired)
		if r.model("m").Batches == 1 {
			return // it expired in the worker
		}
		if most > patience { // on a slow machine it expired in the queue: the next one has twice the time
			t.Fatal("the worker never got a request")
		}
	}
}

func TestAFullRingRefusesTheNextClientAndTakesItOnceThereIsRoom(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	first := h.dial(client.WithWindow(40))
	for _, window := range []int{25, 65} { // of 24 free slots, of a ring of 64
		_, err := h.tryDial(client.WithWindow(window))
		must.Fail(t, fmt.Sprintf("a window of %d", window), err, status.ErrRingFull)
	}
	if _, err := h.tryDial(client.WithWindow(64)); !errors.Is(err, status.ErrQuota) ||
		!strings.Contains(err.Error(), "may have 56 (max_window)") {
		t.Errorf("a window of the whole ring: %v", err)
	}
	second := h.dial(client.WithWindow(24))
	works(t, first, 60)
	works(t, second, 60)
	h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: theModel, Do: "read", Window: 1}}).refused(status.ErrRingFull)
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

func TestASlotOfAPrivateModelIsClearedBeforeAnotherHasIt(t *testing.T) {
	m := theModel
	m.Private = true
	h := newHost(t, m)
	h.worker(m)
	first := h.dial(client.WithWindow(4))
	const secret = int64(0x5ec4e75ec4e75ec4)
	x := make([]int64, 2*testbed.Width)
	for i := range x {
		x[i] = secret
	}
	must.Do(t, testbed.Ask(background(t), first, x, testbed.Width))
	failed := askLater(background(t), first, cmdFail, secret) // its reason is on the board
	failed.ends(t, status.ErrFailed)
	first.Close()
	h.settled() // its window is back
	s, err := attach.Open(t.Context(), h.socket, &control.Request{Op: control.OpClient, Model: "m", Window: 8})
	must.Do(t, err)
	defer s.Close()
	for what, mem := range map[string][]byte{"planes": s.Planes.Bytes(), "board": s.BoardSeg.Bytes()} {
		for _, number := range []int64{secret, testbed.Answer(secret, 0)} {
			if i := bytes.Index(mem, binary.NativeEndian.AppendUint64(nil, uint64(number))); i >= 0 {
				t.Errorf("the first client's %#x is in the %s, at %d", number, what, i)
			}
		}
		if bytes.Contains(mem, []byte("command to fail")) {
			t.Errorf("the reason of its failure is in the %s", what)
		}
	}
}
