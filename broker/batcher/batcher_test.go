// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
)

func mustNew(t *testing.T, settings policy.Settings) *Batcher {
	t.Helper()
	b, err := New(settings)
	must.Do(t, err)
	return b
}

func TestAPeakIsForgottenAfterTwoPeriods(t *testing.T) {
	b := mustNew(t, policy.Settings{MaxBatchSize: 8, WaitTime: time.Second})
	b.WorkerReady(Worker{})
	one := func(id RequestID) {
		must.Do(t, b.Arrive(0, Request{ID: id, Rows: 1, Deadline: Never}))
	}
	for id := range RequestID(4) {
		one(id)
	}
	b.BatchDone(0, b.Decide(0).Dispatches[0].Batch, 0, 0) // four have ended
	waits := 0
	for range 100 {
		one(0)
		if len(b.Decide(0).Dispatches) == 0 {
			waits++ // for other requests of the same client
			b.Cancel(0)
			continue
		}
		b.BatchDone(0, b.lastBatch, 0, 0)
	}
	if want := 2*peakPeriod - 4; waits != want {
		t.Errorf("waited %d times, want %d", waits, want)
	}
}

func TestALowerLevelIsNotStarvedForEverWithAgeing(t *testing.T) {
	b := mustNew(t, policy.Settings{MaxBatchSize: 1, Levels: make([]policy.Level, 4), Ageing: 100})
	b.WorkerReady(Worker{})
	now := Time(0)
	arrive := func(id RequestID, level int) {
		must.Do(t, b.Arrive(now, Request{ID: id, Level: level, Rows: 1, Arrived: now, Deadline: Never}))
	}
	arrive(1, 0)
	arrive(0, 3) // of the last level, under a stream of two urgent ones for each place
	for ; now < 10_000; now += 10 {
		arrive(RequestID(2+now/5), 0)
		arrive(RequestID(3+now/5), 0)
		b.BatchDone(0, b.lastBatch, 0, 0)
		for _, d := range b.Decide(now).Dispatches {
			if d.Requests[0] == 0 {
				// Lifted three times it is level 0; then only what arrived
				// before it may go first.
				if now < 300 || now > 310 {
					t.Errorf("went at %d, want at 300", now)
				}
				return
			}
		}
	}
	t.Error("starved")
}

func TestARequeuedRequestWithoutARecordIsStillQueued(t *testing.T) {
	b := mustNew(t, policy.Settings{MaxBatchSize: 4})
	b.WorkerReady(Worker{})
	must.Do(t, b.Arrive(0, Request{ID: 7, Rows: 1, Deadline: Never}))
	b.Requeue(0, Request{ID: 8, Rows: 1, Level: 9, Deadline: Never})
	b.Requeue(0, Request{ID: 9, Rows: 6, Deadline: Never}) // larger than the maximum is by now
	b.Requeue(0, Request{ID: 7, Rows: 1, Deadline: Never}) // waits already
	if d := b.Decide(0); len(d.Dispatches) != 1 || d.Dispatches[0].Requests[0] != 9 || d.Dispatches[0].Why != Retry {
		t.Fatalf("%+v", d)
	}
	b.BatchDone(0, 1, 0, 0)
	if d := b.Decide(0); len(d.Dispatches) != 1 || !slices.Equal(d.Dispatches[0].Requests, []RequestID{8, 7}) {
		t.Fatalf("%+v", d)
	}
}

func TestArriveNamesWhatIsWrong(t *testing.T) {
	b := mustNew(t, policy.Settings{MaxBatchSize: 2})
	must.Do(t, b.Arrive(0, Request{Rows: 2, Deadline: Never}))
	for want, r := range map[error]Request{
		ErrInUse:    {ID: 0, Rows: 1, Deadline: Never},
		ErrNoRows:   {ID: 1, Rows: 0, Deadline: Never},
		ErrTooLarge: {ID: 1, Rows: 3, Deadline: Never},
		ErrNoLevel:  {ID: 1, Rows: 1, Level: -2, Deadline: Never},
		ErrExpired:  {ID: 1, Rows: 1},
	} {
		if err := b.Arrive(0, r); !errors.Is(err, want) {
			t.Errorf("%+v: %v, want %v", r, err, want)
		}
	}
	if b.Queued() != 1 || b.QueuedRows() != 2 || b.queuedAt[0] != 1 || b.queuedAt[1] != 0 {
		t.Errorf("a refusal changed something")
	}
}

func TestTheConfigIsACopyOnTheWayInAndOut(t *testing.T) {
	in := policy.Settings{MaxBatchSize: 4, PreferredBatchSizes: []int{2}, Levels: make([]policy.Level, 1), Buckets: [][]uint32{{1}}}
	b := mustNew(t, in)
	in.PreferredBatchSizes[0], in.Buckets[0][0], in.Levels[0].MaxQueue = 3, 3, 3
	out := b.Settings()
	out.PreferredBatchSizes[0], out.Buckets[0][0], out.Levels[0].MaxQueue = 4, 4, 4
	if c := b.Settings(); c.PreferredBatchSizes[0] != 2 || c.Buckets[0][0] != 1 || c.Levels[0].MaxQueue != 0 {
		t.Errorf("the caller's slices are shared: %+v", c)
	}
}

func TestShapesAreRecycled(t *testing.T) {
	b := mustNew(t, policy.Settings{MaxBatchSize: 4, WaitTime: time.Hour})
	for i := range uint32(100_000) {
		r := Request{ID: RequestID(i % 10), Rows: 1, Deadline: Never, Dims: Dims{i, i + 1}}
		must.Do(t, b.Arrive(0, r))
		if i%10 == 9 {
			for id := range RequestID(10) {
				b.Cancel(id)
			}
		}
	}
	if n := len(b.shapes.shapes); n > 11 {
		t.Errorf("%d shapes for 10 requests", n)
	}
}

func TestTheShapeTableFindsWhatItHolds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	table := newShapeTable()
	numbers := map[Dims]int32{}
	for range 200_000 {
		d := Dims{1 + uint32(rng.IntN(300)), uint32(rng.IntN(3))}
		s := table.find(&d)
		if old, ok := numbers[d]; ok && old != s {
			t.Fatalf("%v is shape %d, was %d", d, s, old)
		}
		numbers[d] = s
		if rng.IntN(2) == 0 {
			table.recycle(s)
			delete(numbers, d)
		}
	}
	if table.used != len(numbers) {
		t.Errorf("%d shapes in use, want %d", table.used, len(numbers))
	}
}

func TestATimerQueueGivesTheEarliestBackInAnyOrder(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 3))
		var q timerQueue
		type timer struct {
			id  uint32
			at  Time
			tie int64
		}
		var set []timer
		for range 2000 {
			if len(set) == 0 || rng.IntN(5) < 3 {
				x := timer{rng.Uint32N(400), Time(rng.IntN(500)), int64(rng.IntN(5))}
				if slices.ContainsFunc(set, func(y timer) bool { return y.id == x.id }) {
					continue
				}
				q.add(x.id, x.at, x.tie)
				set = append(set, x)
			} else {
				i := rng.IntN(len(set))
				q.remove(set[i].id)
				q.remove(set[i].id) // twice is once
				set = slices.Delete(set, i, i+1)
			}
			id, at := q.first()
			if len(set) == 0 {
				if at != Never {
					t.Fatalf("seed %d: empty, but first is at %d", seed, at)
				}
				continue
			}
			best := slices.MinFunc(set, func(x, y timer) int {
				return cmp.Or(cmp.Compare(x.at, y.at), cmp.Compare(x.tie, y.tie))
			})
			i := slices.IndexFunc(set, func(y timer) bool { return y.id == id })
			if i < 0 || at != best.at || set[i].at != best.at || set[i].tie != best.tie {
				t.Fatalf("seed %d: first is %d at %d, want %+v", seed, id, at, best)
			}
		}
		q.clear()
		if _, at := q.first(); at != Never {
			t.Fatalf("seed %d: not empty after clear", seed)
		}
	}
}
