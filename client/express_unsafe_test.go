package client_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// through is cbindings/express.c in Go, so that the race detector sees it. It
// says what became of the request.
func through(x *shm.Express, c *client.Client, in []float32, out []float32, slice time.Duration) (fate, client.Request) {
	if !x.TryEnter() {
		return refused, client.Request{}
	}
	leave := func() {
		x.Leave()
		if x.Wanted.Load() == 1 {
			c.TakeBack()
		}
	}
	if x.Lent.Load() == 0 || x.Dead.Load() == 1 {
		leave()
		return refused, client.Request{}
	}
	copy(unsafe.Slice((*float32)(x.In[0].At), len(in)), in)
	x.Committed = shm.Now()
	e := shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: x.Slot, Gen: x.Gen + 1, Committed: x.Committed}
	for !x.RingLock.CompareAndSwap(0, 1) {
		time.Sleep(0)
	}
	words, tail := (*shm.RingWords)(x.RingWords), x.RingTail
	unsafe.Slice((*shm.Commit)(x.Entries), x.RingMask+1)[tail&uint64(x.RingMask)] = e
	x.RingTail, x.Gen = tail+1, e.Gen
	words.Tail.Swap(tail + 1)
	ring := words.ArmedAt.Load() == tail
	x.RingLock.Store(0)
	if ring {
		x.Doorbell.Ring()
	}
	bell, word := (*atomic.Uint32)(x.Bell), (*atomic.Uint64)(x.Word)
	for until := x.Committed + int64(slice); ; {
		seen := bell.Load()
		if w := shm.Word(word.Load()); w.Generation() == x.Gen {
			if w.Status() != status.OK || w.Held() {
				return adopted, c.Adopt()
			}
			copy(out, unsafe.Slice((*float32)(x.Out[0].At), len(out)))
			leave()
			return answered, client.Request{}
		}
		left := until - shm.Now()
		if left <= 0 || x.Dead.Load() == 1 {
			return adopted, c.Adopt()
		}
		ts := unix.NsecToTimespec(min(left, int64(10*time.Millisecond)))
		_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(bell)), 0, uintptr(seen), uintptr(unsafe.Pointer(&ts)), 0, 0)
	}
}

type fate int

const (
	refused fate = iota
	answered
	adopted
)

// expressUser sends requests whichever way there is.
type expressUser struct {
	x     *shm.Express
	c     *client.Client
	fates [3]atomic.Int64
}

// send doubles four numbers; nil if the broker went away.
func (u *expressUser) send(t *testing.T, rnd *rand.Rand, v float32) []float32 {
	in, out := []float32{v, v + 1, v + 2, v + 3}, make([]float32, 4)
	var r client.Request
	how := refused
	if rnd.IntN(5) > 0 {
		slices := []time.Duration{patience, patience, 100 * time.Microsecond, 0}
		how, r = through(u.x, u.c, in, out, slices[rnd.IntN(len(slices))])
	}
	u.fates[how].Add(1)
	switch how {
	case answered:
		return out
	case refused:
		var err error
		if r, err = u.c.Fill(soon(t), in); err == nil {
			err = r.Commit(soon(t))
		}
		if err != nil {
			u.mayFail(t, err)
			return nil
		}
	case adopted:
		if rnd.IntN(4) == 0 { // given up
			_ = r.Release()
			return nil
		}
	}
	if how == refused {
		defer u.c.Lend() // the slot, once it is released
	}
	defer r.Release()
	if err := r.WaitFor(patience); err != nil {
		u.mayFail(t, err)
		return nil
	}
	view, err := r.Output("y")
	if err != nil {
		t.Error(err)
		return nil
	}
	y, err := tensor.As[float32](view)
	if err != nil {
		t.Error(err)
		return nil
	}
	copy(out, y)
	return out
}

// mayFail: a broker that goes may refuse first.
func (u *expressUser) mayFail(t *testing.T, err error) {
	var s status.Code
	if !errors.As(err, &s) || !s.Retryable() {
		t.Errorf("ended with %v", err)
	}
}

func (u *expressUser) load(t *testing.T, users, requests int) {
	var wg sync.WaitGroup
	for k := range users {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(k)))
			for n := range requests {
				v := float32(k*requests + n)
				if y := u.send(t, rnd, v); y != nil && !slices.Equal(y, []float32{2 * v, 2*v + 2, 2*v + 4, 2*v + 6}) {
					t.Errorf("wrong answer: %v of %v", y, v)
				}
			}
		})
	}
	wg.Wait()
}

// whole checks that no slot was lost.
func (u *expressUser) whole(t *testing.T, window int) {
	t.Helper()
	for range window {
		r, err := u.c.Claim(soon(t), 1)
		if err != nil {
			t.Fatalf("a slot is missing: %v", err)
		}
		defer r.Release()
	}
}

func TestALentSlotAndOrdinaryRequestsShareAWindow(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(double)
	for _, window := range []int{1, 2, 8} {
		t.Run(fmt.Sprintf("window %d", window), func(t *testing.T) {
			x := &shm.Express{}
			u := &expressUser{x: x, c: r.dial(client.WithWindow(window), client.WithExpress(x))}
			u.load(t, 1, 300) // alone, so that a slot is lent most of the time
			u.load(t, 3, 200)
			u.whole(t, window)
			if u.fates[answered].Load() == 0 || u.fates[adopted].Load() == 0 {
				t.Errorf("fates %d, %d, %d: some never happened", u.fates[refused].Load(), u.fates[answered].Load(), u.fates[adopted].Load())
			}
		})
	}
}

func TestALentSlotComesBackFromABrokerThatGoes(t *testing.T) {
	r := newRing(t, plain(t))
	r.work(double)
	x := &shm.Express{}
	u := &expressUser{x: x, c: r.dial(client.WithWindow(2), client.WithExpress(x))}
	done := make(chan struct{})
	go func() {
		defer close(done)
		u.load(t, 2, 500)
	}()
	for range 3 {
		time.Sleep(20 * time.Millisecond)
		r.stop()
		r.start()
	}
	<-done
	u.whole(t, 2)
}

func TestClosingAClientEndsWhatIsUnderWayThroughALentSlot(t *testing.T) {
	r := newRing(t, plain(t))
	leave := r.work(double)
	x := &shm.Express{}
	u := &expressUser{x: x, c: r.dial(client.WithWindow(2), client.WithExpress(x))}
	for x.Lent.Load() == 0 {
		u.load(t, 1, 1)
	}
	leave() // nobody answers from here on
	ends := make(chan fate, 1)
	go func() {
		how, q := through(x, u.c, make([]float32, 4), make([]float32, 4), 2*patience)
		_ = q.Release()
		ends <- how
	}()
	for x.Inside.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	u.c.Close()
	select {
	case how := <-ends:
		if how != adopted {
			t.Errorf("fate %d, want adopted", how)
		}
	case <-time.After(patience):
		t.Fatal("closing did not end the request")
	}
}
