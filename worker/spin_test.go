package worker

import (
	"math"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/shm"
)

func TestAWorkerSpinsOnlyWhileMailsComeSoon(t *testing.T) {
	looked := 0
	comesAt := func(n int) func() bool {
		looked = 0
		return func() bool { looked++; return looked == n }
	}
	s := spin{limit: int64(time.Hour)} // so that "soon" does not hang on the machine's load
	if s.until(comesAt(1), math.MaxInt64) || looked != 0 {
		t.Error("a worker that never had a mail spins")
	}
	s.mailed() // at once
	if !s.pays {
		t.Error("the mail came at once, and spinning does not pay")
	}
	if !s.until(comesAt(3), math.MaxInt64) || looked != 3 {
		t.Errorf("looked %d times for a mail that was there at the third", looked)
	}
	s.mailed()
	s.limit = int64(time.Millisecond)
	if s.until(comesAt(-1), math.MaxInt64) {
		t.Error("a mail came from nowhere")
	}
	s.mailed() // too late
	if s.until(comesAt(1), math.MaxInt64) {
		t.Error("spins although the last mail came late")
	}
}

func TestASpinEndsWithTheCallersTime(t *testing.T) {
	s := spin{limit: int64(time.Hour), pays: true}
	if s.until(func() bool { return false }, shm.Now()+int64(time.Millisecond)) {
		t.Error("a mail came from nowhere")
	}
}

func TestAWorkerSpinsForAShareOfItsBatchTime(t *testing.T) {
	var s spin
	for _, c := range []struct{ ran, spins time.Duration }{{0, leastSpin}, {time.Millisecond, 250 * time.Microsecond}, {time.Second, mostSpin}} {
		s.ran(int64(c.ran))
		if got := time.Duration(s.limit); got != c.spins {
			t.Errorf("after a batch of %v it spins for %v, want %v", c.ran, got, c.spins)
		}
	}
}
