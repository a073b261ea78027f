// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

func testSignature(t *testing.T, inputs, outputs []string) (sig tensor.Signature) {
	t.Helper()
	for _, side := range []struct {
		texts []string
		into  *[]tensor.Spec
	}{{inputs, &sig.Inputs}, {outputs, &sig.Outputs}} {
		for _, text := range side.texts {
			spec, err := tensor.ParseSpec(text)
			must.Do(t, err)
			*side.into = append(*side.into, spec)
		}
	}
	return sig
}

func testLayout(t *testing.T, slots, maxBatch int) *Layout {
	t.Helper()
	l, err := NewLayout(testSignature(t, []string{"x:f32[4]"}, []string{"y:f32[2]"}), slots, maxBatch)
	must.Do(t, err)
	return l
}

// segment makes one of each kind of memory.
func segments(t *testing.T, size int64) map[string]*Segment {
	t.Helper()
	all := map[string]*Segment{}
	for name, create := range map[string]func(string, int64) (*Segment, error){"memfd": Create, "heap": CreateOnHeap} {
		s, err := create("test", size)
		must.Do(t, err)
		t.Cleanup(s.Close)
		all[name] = s
	}
	return all
}

func TestAWordKeepsItsParts(t *testing.T) {
	for _, gen := range []uint32{0, 1, 1 << 31, ^uint32(0)} {
		for _, s := range status.All() {
			for _, held := range []bool{false, true} {
				w := MakeWord(gen, s, held)
				if w.Generation() != gen || w.Status() != s || w.Held() != held {
					t.Errorf("%d %v %v became %v", gen, s, held, w)
				}
			}
		}
	}
}

func TestExactlyOneEndCountsForAGeneration(t *testing.T) {
	l := testLayout(t, 4, 1)
	for name, seg := range segments(t, l.BoardSize) {
		t.Run(name, func(t *testing.T) {
			b := NewBoard(l, seg)
			b.Reset(2, 10)
			for gen := uint32(11); gen < 200; gen++ {
				var wg sync.WaitGroup
				won := make(chan status.Code, 8)
				for _, s := range []status.Code{status.OK, status.ErrExpired, status.ErrCanceled, status.ErrFailed} {
					wg.Add(1)
					go func() {
						defer wg.Done()
						if b.End(2, gen, s, s == status.ErrExpired) {
							won <- s
						}
					}()
				}
				wg.Wait()
				if len(won) != 1 {
					t.Fatalf("generation %d was ended %d times", gen, len(won))
				}
				if s := <-won; b.Word(2) != MakeWord(gen, s, s == status.ErrExpired) {
					t.Fatalf("%v won, the word says %v", s, b.Word(2))
				}
			}
		})
	}
}

func TestALateEndOfAnOldGenerationChangesNothing(t *testing.T) {
	l := testLayout(t, 1, 1)
	b := NewBoard(l, segments(t, l.BoardSize)["memfd"])
	b.Reset(0, 5)
	if !b.End(0, 7, status.OK, false) || b.End(0, 6, status.ErrFailed, false) || b.End(0, 7, status.ErrFailed, false) {
		t.Error("an old generation ended a newer one")
	}
	// Generations wrap.
	b.Reset(0, ^uint32(0))
	if !b.End(0, 0, status.OK, false) || b.End(0, ^uint32(0), status.ErrFailed, false) || b.Word(0).Generation() != 0 {
		t.Errorf("around the wrap: %v", b.Word(0))
	}
}

func TestReclaimTakesOnlyTheHeldMarkOfItsGeneration(t *testing.T) {
	l := testLayout(t, 1, 1)
	b := NewBoard(l, segments(t, l.BoardSize)["memfd"])
	b.End(0, 1, status.ErrExpired, true)
	b.Reclaim(0, 2)
	if !b.Word(0).Held() {
		t.Error("another generation's reclaim took the mark")
	}
	b.Reclaim(0, 1)
	if w := b.Word(0); w != MakeWord(1, status.ErrExpired, false) {
		t.Errorf("after reclaim: %v", w)
	}
	b.End(0, 2, status.OK, false)
	b.Reclaim(0, 2)
	if w := b.Word(0); w != MakeWord(2, status.OK, false) {
		t.Errorf("reclaim of what was not held: %v", w)
	}
}

func TestAReasonIsCutToItsRoomAndADamagedLengthIsNotBelieved(t *testing.T) {
	l := testLayout(t, 3, 1)
	b := NewBoard(l, segments(t, l.BoardSize)["memfd"])
	long := make([]byte, 3*reasonBytes)
	for i := range long {
		long[i] = 'x'
	}
	b.SetReason(1, string(long))
	if got := b.Reason(1); len(got) != reasonBytes {
		t.Errorf("%d bytes of reason", len(got))
	}
	if b.Reason(0) != "" || b.Reason(2) != "" {
		t.Error("it ran over into a neighbour")
	}
	b.Record(1).ReasonLen = ^uint32(0)
	if got := b.Reason(1); len(got) != reasonBytes {
		t.Errorf("%d bytes of a damaged reason", len(got))
	}
}

func TestABellWakesItsWaiter(t *testing.T) {
	l := testLayout(t, 1, 1)
	for name, seg := range segments(t, l.BoardSize) {
		t.Run(name, func(t *testing.T) {
			bell := NewBoard(l, seg).Bell(0)
			for range 200 {
				seen := bell.Count.Load()
				woken := make(chan struct{})
				go func() {
					var parker Parker
					for bell.Count.Load() == seen {
						bell.Wait(&parker, seen, time.Hour)
					}
					close(woken)
				}()
				bell.Ring()
				select {
				case <-woken:
				case <-time.After(2 * time.Minute):
					t.Fatal("the waiter sleeps on")
				}
			}
		})
	}
}
