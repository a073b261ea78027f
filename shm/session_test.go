// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"math/rand"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
)

func newRing(t *testing.T, window int) (*Segment, *Producer[Commit], *Consumer[Commit]) {
	t.Helper()
	s := segments(t, ClientSegmentSize(window, false))["heap"]
	c := NewConsumer(CommitRing(s, window))
	return s, &Producer[Commit]{Ring: CommitRing(s, window)}, &c
}

func TestARingGivesBackInOrderAcrossItsEnd(t *testing.T) {
	_, p, c := newRing(t, 2) // 8 entries
	rng := rand.New(rand.NewSource(1))
	pushed, taken := uint32(0), uint32(0)
	for range 5000 {
		for range rng.Intn(9) {
			_, full := p.Push(&Commit{Slot: pushed})
			if want := pushed-taken == 8; full != want {
				t.Fatalf("with %d entries full is %v", pushed-taken, full)
			}
			if !full {
				pushed++
			}
		}
		n, err := c.Pending()
		if err != nil || uint32(n) != pushed-taken {
			t.Fatalf("%d pending, %v", n, err)
		}
		for range rng.Intn(n + 1) {
			var e Commit
			if c.Take(&e); e.Slot != taken {
				t.Fatalf("took %d, expected %d", e.Slot, taken)
			}
			taken++
		}
		c.Give()
	}
}

func TestOnlyThePushThatTheConsumerSleepsForRings(t *testing.T) {
	_, p, c := newRing(t, 4)
	push := func() bool {
		ring, full := p.Push(&Commit{})
		if full {
			t.Fatal("full")
		}
		return ring
	}
	if push() {
		t.Error("rang a consumer that was never armed")
	}
	if c.Arm() {
		t.Error("armed although an entry is there")
	}
	var e Commit
	c.Take(&e)
	c.Give()
	if !c.Arm() {
		t.Error("not armed although nothing is there")
	}
	if !push() || push() || push() {
		t.Error("not exactly the first push after arming rings")
	}
}

func TestNoEntryIsSleptThrough(t *testing.T) {
	_, p, c := newRing(t, 4)
	const total = 20_000
	bell := make(chan struct{}, 1)
	go func() {
		rng := rand.New(rand.NewSource(2))
		for i := 0; i < total; {
			ring, full := p.Push(&Commit{Slot: uint32(i)})
			if full {
				time.Sleep(10 * time.Microsecond)
				continue
			}
			i++
			if ring {
				select {
				case bell <- struct{}{}:
				default:
				}
			}
			if rng.Intn(50) == 0 {
				time.Sleep(time.Duration(rng.Intn(20)) * time.Microsecond)
			}
		}
	}()
	for next := uint32(0); next < total; {
		n, err := c.Pending()
		must.Do(t, err)
		for range n {
			var e Commit
			if c.Take(&e); e.Slot != next {
				t.Fatalf("took %d, expected %d", e.Slot, next)
			}
			next++
		}
		c.Give()
		if next == total || !c.Arm() {
			continue
		}
		select {
		case <-bell:
		case <-time.After(2 * time.Minute):
			t.Fatalf("asleep after %d entries, and nobody rang", next)
		}
	}
}

func TestAnImpossibleTailIsAnError(t *testing.T) {
	s, _, c := newRing(t, 1)
	for _, tail := range []uint64{5, 1 << 40, ^uint64(0)} {
		at[ringWords](s.mem, ringWordsAt).Tail.Store(tail)
		if n, err := c.Pending(); !errors.Is(err, status.ErrProtocol) || n != 0 {
			t.Errorf("tail %d: %d pending, %v", tail, n, err)
		}
	}
}

func TestAMailboxWakesItsWorkerForMailAndForAPoke(t *testing.T) {
	const depth, maxBatch = 2, 3
	for name, s := range segments(t, WorkerSegmentSize(depth, maxBatch)) {
		t.Run(name, func(t *testing.T) {
			box := NewMailbox(s, depth, maxBatch)
			const mails = 2000
			var wg sync.WaitGroup
			wg.Add(1)
			taken := make(chan struct{}, depth)
			go func() {
				defer wg.Done()
				var parker Parker
				for next := uint64(0); next < mails; {
					seen := box.Bell.Load()
					if box.Tail.Load() == next {
						box.Wait(&parker, seen, next, time.Hour)
						continue
					}
					mail, reqs := box.At(next)
					if mail.Batch != next || reqs[maxBatch-1].Slot != uint32(next) {
						t.Errorf("mail %d says %d, %d", next, mail.Batch, reqs[maxBatch-1].Slot)
					}
					next++
					taken <- struct{}{}
				}
			}()
			for n := range uint64(mails) {
				if n >= depth {
					select {
					case <-taken:
					case <-time.After(2 * time.Minute):
						t.Fatalf("the worker sleeps on mail %d", n)
					}
				}
				mail, reqs := box.At(n)
				mail.Batch, reqs[maxBatch-1].Slot = n, uint32(n)
				box.Post(n)
				if n%7 == 0 {
					box.Poke()
				}
			}
			wg.Wait()
		})
	}
}

func TestADoorbellRingsThroughAFullCounter(t *testing.T) {
	d, err := NewDoorbell()
	must.Do(t, err)
	defer d.Close()
	for range 100 {
		d.Ring() // never blocks
	}
}
