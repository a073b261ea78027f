package broker

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/shm"
)

// A loop that looks out before it parks must miss nothing that one that
// parks at once sees: an event, a post, the time.
func TestALoopThatLooksOutSeesEventsPostsAndTime(t *testing.T) {
	l, err := newLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	bell, err := shm.NewDoorbell()
	if err != nil {
		t.Fatal(err)
	}
	defer bell.Close()
	fired := 0
	if _, err := l.watch(int(bell), func() { fired++ }); err != nil {
		t.Fatal(err)
	}
	// In turns after short waits, after which it looks out, and long ones,
	// after which it does not.
	for i, wait := range []time.Duration{0, 0, 5 * time.Millisecond, 0, 0, 5 * time.Millisecond} {
		before, until := fired, shm.Now()+int64(time.Minute)
		if wait == 0 {
			bell.Ring()
		} else {
			until = shm.Now() + int64(wait)
		}
		for fired == before && shm.Now() < until { // a sleep may end early
			if err := l.sleep(until, shm.Now()+int64(shm.LeastSpin), func() {}); err != nil {
				t.Fatal(err)
			}
		}
		if saw := fired - before; saw != 1 && wait == 0 || saw != 0 && wait != 0 {
			t.Errorf("wait %d: %d events", i, saw)
		}
	}
	posted := false
	l.post(func() { posted = true })
	for !posted {
		if err := l.sleep(never, never, l.runPosts); err != nil {
			t.Fatal(err)
		}
	}
}
