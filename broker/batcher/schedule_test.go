// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
)

var (
	seedFlag      = flag.Uint64("seed", 0, "replay the random schedule with this seed, verbosely")
	firstFlag     = flag.Uint64("first_seed", 1, "the seed of the first random schedule")
	schedulesFlag = flag.Int("schedules", 0, "number of random schedules (default 10000; fewer with -short)")
)

// Every random schedule is a sequence of events with a Decide after each few.
// The Batcher must decide exactly as the reference does. The book checks the plainest
// promises by itself, because the reference could be wrong in the same way.
func TestRandomSchedulesAreDecidedAsTheReferenceDoes(t *testing.T) {
	if *seedFlag != 0 {
		must.Do(t, runSchedule(*seedFlag, t.Logf))
		return
	}
	count := 10_000 // make torture runs a million; a wrong tie of timers showed at schedule 7,202
	if *schedulesFlag > 0 {
		count = *schedulesFlag
	}
	defer debug.SetGCPercent(debug.SetGCPercent(400)) // schedules are short-lived: half of the time would go into the collector
	start := time.Now()
	var next, failed atomic.Uint64
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			for failed.Load() < 5 {
				n := next.Add(1)
				if n > uint64(count) {
					return
				}
				seed := *firstFlag + n - 1
				if err := runSchedule(seed, nil); err != nil {
					failed.Add(1)
					t.Errorf("seed %d: %v\nreplay: go test ./broker/batcher -run RandomSchedules -seed %d -v", seed, err, seed)
				}
			}
		})
	}
	workers.Wait()
	t.Logf("%d schedules in %v", count, time.Since(start).Round(time.Millisecond))
}

// schedule is one random schedule in progress.
type schedule struct {
	rng      *rand.Rand
	log      func(string, ...any)
	settings policy.Settings
	fast     *Batcher
	advisor  testAdvisor // of fast
	slow     *reference
	book     *book
	now      Time
}

func runSchedule(seed uint64, log func(string, ...any)) (err error) {
	defer func() {
		if r := recover(); r != nil {
			stack := make([]byte, 4096)
			err = fmt.Errorf("panic: %v\n%s", r, stack[:runtime.Stack(stack, false)])
		}
	}()
	if log == nil {
		log = func(string, ...any) {}
	}
	rng := rand.New(rand.NewPCG(seed, 0x5eed))
	s := &schedule{rng: rng, log: log}
	s.now, s.settings = s.time(5), s.randomSettings()
	log("config %+v", s.settings)
	if s.fast, err = NewAdvised(s.settings, &s.advisor); err != nil {
		return err
	}
	if s.slow, err = newReference(s.settings); err != nil {
		return err
	}
	s.fast.credit = 10
	s.slow.credit = 10
	s.book = newBook(s.settings, 24)
	steps := 20 + rng.IntN(30)
	if seed%500 == 0 { // now and then a long queue
		s.book = newBook(s.settings, 200)
		steps = 400
	}
	for range steps {
		for range 1 + rng.IntN(3) {
			if err := s.event(); err != nil {
				return err
			}
		}
		if err := s.decide(); err != nil {
			return err
		}
	}
	return s.drain()
}

// time is a random time below n.
func (s *schedule) time(n int) Time { return Time(s.rng.IntN(n)) }

func (s *schedule) duration(n int) time.Duration { return time.Duration(s.time(n)) }

func (s *schedule) randomSettings() policy.Settings {
	rng := s.rng
	settings := policy.Settings{MaxBatchSize: 1 + rng.IntN(8), WaitTime: s.duration(20)}
	switch {
	case rng.IntN(4) == 0:
		settings.WaitTime = policy.Auto
	case rng.IntN(3) == 0:
		settings.WaitTime = 0
	}
	if rng.IntN(2) == 0 {
		for size := 1; size <= settings.MaxBatchSize; size++ {
			if rng.IntN(3) == 0 {
				settings.PreferredBatchSizes = append(settings.PreferredBatchSizes, size)
			}
		}
	}
	if rng.IntN(2) == 0 {
		for range 1 + rng.IntN(4) {
			settings.Levels = append(settings.Levels, s.randomLevel())
		}
		settings.DefaultPriority = rng.IntN(len(settings.Levels))
		if rng.IntN(2) == 0 {
			settings.Ageing = time.Duration(1 + s.time(20))
		}
	}
	if rng.IntN(3) == 0 {
		settings.Buckets = [][]uint32{{2, 4}, nil, {3}}[:1+rng.IntN(3)]
	}
	settings.PreserveOrder = rng.IntN(3) == 0
	if rng.IntN(3) == 0 {
		settings.MaxBatchCost = 1 + rng.IntN(16)
	}
	return settings
}

func (s *schedule) randomLevel() (l policy.Level) {
	rng := s.rng
	if rng.IntN(4) == 0 {
		l.MaxQueue = 1 + rng.IntN(4)
	}
	if rng.IntN(3) == 0 {
		l.DefaultTimeout = time.Duration(1 + s.time(30))
	}
	if rng.IntN(4) == 0 {
		l.MaxTimeout = time.Duration(1 + s.time(40))
	}
	l.OnTimeout = policy.Action(rng.IntN(2))
	return l
}

// event makes one random thing happen to both.
func (s *schedule) event() error {
	switch k := s.rng.IntN(40); {
	case k < 18:
		return s.arrive()
	case k < 25:
		return s.batchDone()
	case k < 29:
		s.now += 1 + s.time(10)
	case k < 31:
		w := Worker{
			ID: WorkerID(s.rng.IntN(3)), Share: s.rng.IntN(4), Lanes: s.rng.IntN(3), Depth: s.rng.IntN(4),
			Pad: Padding(s.rng.IntN(3)), PadTo: s.rng.IntN(10),
			Paused: s.rng.IntN(6) == 0, Doubted: s.rng.IntN(3) == 0,
		}
		s.log("worker ready %+v", w)
		s.fast.WorkerReady(w)
		s.slow.WorkerReady(w)
		s.book.workerReady(w)
	case k == 31:
		s.workerGone(WorkerID(s.rng.IntN(3)))
	case k == 32:
		c := ClientID(s.rng.IntN(4))
		s.log("client %d joined", c)
		s.fast.ClientJoined(c)
		s.slow.ClientJoined(c)
	case k == 33 && s.rng.IntN(3) == 0:
		return s.clientLeft(ClientID(s.rng.IntN(4)))
	case k == 34 && s.rng.IntN(3) == 0:
		return s.setPolicy()
	case k < 36:
		id := RequestID(s.rng.IntN(len(s.book.requests)))
		got, want := s.fast.Cancel(id), s.slow.Cancel(id)
		s.log("cancel %d: %v", id, got)
		if got != want {
			return fmt.Errorf("Cancel(%d) is %v, reference %v", id, got, want)
		}
		return s.book.cancelled(id, got)
	case k < 38:
		id := RequestID(s.rng.IntN(len(s.book.requests)))
		s.log("ended %d", id)
		s.fast.Ended(id, s.now)
		s.slow.Ended(id, s.now)
		s.book.ended(id)
	case k == 38:
		s.advisor.hold = s.time(30)
		s.slow.advisor.hold = s.advisor.hold
		s.log("hold for %d", s.advisor.hold)
	case k == 39:
		c, cost := ClientID(s.rng.IntN(4)), s.time(5)
		s.log("%d: client %d cost %d", s.now, c, cost)
		s.fast.Charge(s.now, c, cost)
		s.slow.Charge(s.now, c, cost)
	}
	return nil
}

func (s *schedule) arrive() error {
	id, ok := s.book.freeID(s.rng)
	if !ok {
		return nil
	}
	r := Request{
		ID: id, Client: ClientID(s.rng.IntN(4)), Rows: 1, Level: s.rng.IntN(3) - 1,
		Arrived: s.now - s.time(3), Deadline: Never,
	}
	if s.rng.IntN(25) == 0 {
		r.Share, r.Avoid = s.retry()
	}
	if s.rng.IntN(2) == 0 {
		r.Rows = 1 + s.rng.IntN(s.settings.MaxBatchSize)
	}
	if s.rng.IntN(50) == 0 {
		r.Rows = s.settings.MaxBatchSize + 1
	}
	if s.rng.IntN(3) == 0 {
		r.Level = s.rng.IntN(s.settings.LevelCount())
	}
	if s.rng.IntN(3) == 0 {
		r.Deadline = r.Arrived + s.time(40)
	}
	if s.rng.IntN(3) == 0 {
		r.Dims = Dims{uint32(s.rng.IntN(6)), 0, uint32(s.rng.IntN(2))}
	}
	if s.rng.IntN(3) == 0 {
		r.Cost = s.rng.IntN(6)
	}
	got, want := s.fast.Arrive(s.now, r), s.slow.Arrive(s.now, r)
	s.log("%d: arrive %+v: %v", s.now, r, got)
	if got != want {
		return fmt.Errorf("Arrive(%+v) is %v, reference %v", r, got, want)
	}
	if got == nil {
		s.book.arrived(r)
	}
	return nil
}

// retry is how a request is tried again.
func (s *schedule) retry() (share int, avoid WorkerID) {
	if share = 1; s.rng.IntN(2) == 0 {
		share += s.rng.IntN(4)
	}
	if avoid = NoWorker; s.rng.IntN(2) == 0 {
		avoid = WorkerID(s.rng.IntN(3))
	}
	return share, avoid
}

func (s *schedule) batchDone() error {
	w, id, ok := s.book.someBatch(s.rng)
	if !ok {
		return nil
	}
	started := s.now - s.time(20)
	finished := started + s.time(20) - 2 // a clock may be wrong
	if s.rng.IntN(4) == 0 {
		s.log("batch %d failed as a whole", id)
		s.requeue(s.book.requestsOf(id))
	}
	s.log("batch %d done by %d, ran from %d to %d", id, w, started, finished)
	s.fast.BatchDone(w, id, started, finished)
	s.slow.BatchDone(w, id, started, finished)
	s.book.batchDone(w, id)
	return nil
}

func (s *schedule) workerGone(w WorkerID) {
	s.log("worker %d gone", w)
	s.fast.WorkerGone(w)
	s.slow.WorkerGone(w)
	s.requeue(s.book.workerGone(w))
}

// requeue has the requests of a batch that failed run again, or some end.
func (s *schedule) requeue(lost []*booked) {
	for _, r := range lost {
		retry := r.Request
		if retry.Share = 0; s.rng.IntN(2) == 0 {
			retry.Share, retry.Avoid = s.retry()
		}
		switch {
		case s.rng.IntN(4) == 0:
			s.log("ended %d", r.ID)
			s.fast.Ended(r.ID, Never)
			s.slow.Ended(r.ID, Never)
			s.book.ended(r.ID)
		case r.clientLeft:
			s.log("requeue %d of a client that left", r.ID)
			s.fast.Requeue(s.now, retry)
			s.slow.Ended(r.ID, Never)
			s.book.ended(r.ID)
		default:
			s.log("requeue %+v", retry)
			s.fast.Requeue(s.now, retry)
			s.slow.Requeue(s.now, retry)
			s.book.requeued(retry)
		}
	}
}

func (s *schedule) clientLeft(c ClientID) error {
	got, want := s.fast.ClientLeft(c), s.slow.ClientLeft(c)
	s.log("client %d left: %v", c, got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("ClientLeft(%d) is %v, reference %v", c, got, want)
	}
	s.book.clientLeft(c, got)
	return nil
}

func (s *schedule) setPolicy() error {
	settings := s.randomSettings()
	if s.rng.IntN(2) == 0 {
		settings.Buckets = s.settings.Buckets
	}
	got, want := s.fast.SetPolicy(settings), s.slow.SetPolicy(settings)
	s.log("config %+v: %v", settings, got)
	if (got == nil) != (want == nil) {
		return fmt.Errorf("SetPolicy is %v, reference %v", got, want)
	}
	if got == nil {
		s.settings = settings
		s.book.settings = settings
	}
	return nil
}

func (s *schedule) decide() error {
	got, want := s.fast.Decide(s.now), s.slow.Decide(s.now)
	s.log("%d: decide %+v", s.now, *got)
	if err := sameDecisions(got, want, s.settings); err != nil {
		return err
	}
	if a, b := s.fast.Queued(), s.slow.Queued(); a != b {
		return fmt.Errorf("Queued is %d, reference %d", a, b)
	}
	if a, b := s.fast.QueuedRows(), s.slow.QueuedRows(); a != b {
		return fmt.Errorf("QueuedRows is %d, reference %d", a, b)
	}
	if got.Wake <= s.now {
		return fmt.Errorf("at %d: wake at %d would spin", s.now, got.Wake)
	}
	if err := s.book.decided(s.now, got); err != nil {
		return err
	}
	s.fast.Learn(s.now)
	s.slow.Learn(s.now)
	if s.advisor.events != s.slow.advisor.events {
		return fmt.Errorf("the advisor was told of other events than that of the reference")
	}
	return nil
}

func sameDecisions(got, want *Decisions, settings policy.Settings) error {
	var diff []string
	if !slices.Equal(got.Ended, want.Ended) {
		diff = append(diff, fmt.Sprintf("ended %v, reference %v", got.Ended, want.Ended))
	}
	for i := range max(len(got.Dispatches), len(want.Dispatches)) {
		var g, w any
		if i < len(got.Dispatches) {
			g = got.Dispatches[i]
		}
		if i < len(want.Dispatches) {
			w = want.Dispatches[i]
		}
		if !reflect.DeepEqual(g, w) {
			diff = append(diff, fmt.Sprintf("dispatched %+v\nreference  %+v", g, w))
		}
	}
	// With preferred sizes the Batcher also wakes when ageing may have changed
	// the order, which the reference does not foresee.
	mayWakeEarlier := settings.Ageing > 0 && len(settings.PreferredBatchSizes) > 0
	if got.Wake > want.Wake || (got.Wake < want.Wake && !mayWakeEarlier) {
		diff = append(diff, fmt.Sprintf("wake %v, reference %v", got.Wake, want.Wake))
	}
	if diff == nil {
		return nil
	}
	return fmt.Errorf("%s", strings.Join(diff, "\n"))
}

// drain lets everything end, as a broker would: it finishes batches and calls Decide at the wake-up
// time. Nothing may be left.
func (s *schedule) drain() error {
	s.log("drain")
	for i := range WorkerID(3) {
		if w := s.book.workers[i]; w != nil {
			w.Paused = false
			s.fast.WorkerReady(w.Worker)
			s.slow.WorkerReady(w.Worker)
		}
	}
	for range 1000 {
		if err := s.decide(); err != nil {
			return err
		}
		wake := s.fast.out.Wake
		switch {
		case s.book.batches > 0:
			if err := s.batchDone(); err != nil {
				return err
			}
		case len(s.book.workers) == 0:
			w := Worker{ID: 1}
			s.fast.WorkerReady(w)
			s.slow.WorkerReady(w)
			s.book.workerReady(w)
		case wake != Never:
			s.now = wake
		default:
			return s.book.allEnded(s.fast)
		}
	}
	return fmt.Errorf("requests are left over for ever: %v", s.book.requests)
}
