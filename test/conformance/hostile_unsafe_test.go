// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

const (
	futexRequeue = 3
	slots        = 64 // of the scripts' models
)

// steal moves the waiters of all bells to its own bell until the test ends, as any
// process that may read the board can.
func steal(t *testing.T, socket, model string) {
	t.Helper()
	s, err := attach.Open(t.Context(), socket, &control.Request{Op: control.OpClient, Model: model, Window: 1})
	must.Do(t, err)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		mine := unsafe.Pointer(&s.Board.Bell(s.Info.FirstSlot).Count)
		for {
			for slot := range uint32(slots) {
				if theirs := unsafe.Pointer(&s.Board.Bell(slot).Count); theirs != mine {
					_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(theirs), futexRequeue, 0, 1000, uintptr(mine), 0)
				}
			}
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Microsecond):
			}
		}
	}()
	t.Cleanup(func() { close(stop); <-ended; s.Close() })
}

// damage ends all requests in flight with that status and impossible numbers, as a
// broken worker could.
func damage(t *testing.T, socket, model string, with status.Code) {
	t.Helper()
	s, err := attach.Open(t.Context(), socket, &control.Request{Op: control.OpWorker, Model: model,
		Worker: &control.WorkerInfo{Inputs: []string{"x:f32[4]"}, Outputs: []string{"y:f32[4]"}, Depth: 1}})
	must.Do(t, err)
	for slot := range uint32(slots) {
		r := s.Board.Record(slot)
		*r = shm.Record{Dispatched: -1 << 63, Started: 1<<63 - 1, Finished: -1, ReasonLen: 1<<32 - 1}
		for i := range r.Dims {
			r.Dims[i] = 1<<32 - 1
		}
		s.Board.End(slot, s.Board.Word(slot).Generation()+1, with, false)
		s.Board.Ring(slot)
	}
	t.Cleanup(func() { s.Close() })
}

// lie shows that many steps of every request, of an attempt so much later, as a broken
// worker could.
func lie(t *testing.T, socket, model string, attempts, steps uint32) {
	t.Helper()
	s := growing(t, socket, model)
	for slot := range uint32(slots) {
		s.Board.Show(slot, s.Board.Shown(slot).Attempt()+attempts, steps)
		s.Board.Ring(slot)
	}
}

// flicker shows other progress all the time, of requests that have not begun, until the script ends.
func flicker(t *testing.T, socket, model string) {
	t.Helper()
	s := growing(t, socket, model)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(running.Wait)
	t.Cleanup(stop)
	running.Go(func() {
		for steps := uint32(1); ctx.Err() == nil; steps++ {
			for slot := range uint32(slots) {
				s.Board.Show(slot, s.Board.Shown(slot).Attempt(), steps)
			}
		}
	})
}

// growing attaches as a worker whose output grows.
func growing(t *testing.T, socket, model string) *attach.Session {
	t.Helper()
	s, err := attach.Open(t.Context(), socket, &control.Request{Op: control.OpWorker, Model: model,
		Worker: &control.WorkerInfo{Inputs: []string{"x:f32[4]"}, Outputs: []string{"y:f32[<=6]"}, Depth: 1}})
	must.Do(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

// hostile runs the commands thief, damage, lie and flicker.
func hostile(t *testing.T, socket, who, what string) bool {
	t.Helper()
	switch who {
	case "thief":
		steal(t, socket, what)
	case "damage":
		var model string
		var with uint8
		if _, err := fmt.Sscan(what, &model, &with); err != nil {
			t.Fatal(err)
		}
		damage(t, socket, model, status.Code(with))
	case "lie":
		var model string
		var attempts, steps uint32
		if _, err := fmt.Sscan(what, &model, &attempts, &steps); err != nil {
			t.Fatal(err)
		}
		lie(t, socket, model, attempts, steps)
	case "flicker":
		flicker(t, socket, what)
	default:
		return false
	}
	return true
}

// sessions makes the broker's segments. It knows the last session's, to post mail
// there.
type sessions struct {
	mu   sync.Mutex
	last *shm.Segment
}

func (s *sessions) Create(name string, size int64) (*shm.Segment, error) {
	seg, err := shm.Create(name, size)
	s.mu.Lock()
	defer s.mu.Unlock()
	if name == "session" {
		s.last = seg
	}
	return seg, err
}

// post posts mail of open requests to a worker of depth 2 and 4 rows.
func (s *sessions) post(t *testing.T, text string) {
	t.Helper()
	var n []uint32
	for _, field := range strings.Fields(text) {
		v, err := strconv.ParseUint(field, 10, 32)
		must.Do(t, err)
		n = append(n, uint32(v))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	box := shm.NewMailbox(s.last, 2, 4)
	number := box.Tail.Load()
	mail, reqs := box.At(number)
	*mail = shm.Mail{Batch: number + 1, Requests: uint32(len(n) - 2)}
	mail.Dims[0] = n[1]
	for i := range min(len(n)-2, len(reqs)) {
		reqs[i] = shm.MailRequest{Slot: uint32(i) * n[0], Gen: 1, Rows: n[0]}
		reqs[i].Dims[0] = n[2+i]
	}
	box.Post(number)
}
