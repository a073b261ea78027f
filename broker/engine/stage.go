// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"log/slog"
	"maps"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Stage batches and runs requests of a ring: the batcher, the workers with their leases,
// and the statistics. Only its loop touches it.
type Stage struct {
	loop   *Loop
	ring   *Ring
	next   *Stage // of a pipeline: it gets the finished requests; nil: this is the last
	log    *slog.Logger
	name   string
	layout *shm.Layout // of the ring, as the stage's workers see it
	dims   []int       // the places of its inputs' sizes among those of a commit
	most   int         // the most rows of a batch

	settings policy.Settings                 // in force
	inForce  atomic.Pointer[policy.Settings] // a copy, for other goroutines

	batcher   *auto.Batcher
	workers   []*WorkerSession // by worker id; nil where unused
	present   int              // workers
	staffed   atomic.Bool      // present > 0, for other goroutines
	lostAt    int64            // when a worker died with a batch, until the next one comes
	startTook int64            // from such a death to the next worker, the last time
	blamed    []*ClientSession // that the last batches share which failed, or with which workers died
	bad       int              // of these batches
	vacant    int64            // when the last worker left; 0: there never was one
	staffing  Staffing
	busy      []*WorkerSession            // workers with a batch, in any order
	accounts  map[Process]batcher.Account // of processes that left before they had paid

	// For the loop; see updateLoop.
	dirty    bool // something happened since the last decision
	active   bool // requests are queued or run
	spins    bool // on the loop's list of stages to spin for
	timer    int  // place in the loop's heap of timers, -1 if none
	due      int64
	caughtUp uint64 // the round of the last catchUp
	arrived  int64  // when the last request came

	wake            int64 // when the batcher has to decide again
	runningDeadline int64 // not later than the earliest deadline of a running request
	leaseEnd        int64 // not later than the earliest end of a lease
	resumeAt        int64 // not later than the earliest end of a suspended worker's back-off

	since  time.Time
	stats  stageStats
	recent recent

	recorder *recorder // nil while it is off
}

// StageSpec describes a stage to be made.
type StageSpec struct {
	Name     string
	Settings policy.Settings
	Layout   *shm.Layout // of the ring, as the stage's workers see it
	Dims     []int       // the places of its inputs' sizes among those of a commit
}

func newStage(r *Ring, spec *StageSpec) (*Stage, error) {
	b, err := auto.NewBatcher(spec.Settings)
	if err != nil {
		return nil, err
	}
	settings := spec.Settings
	s := &Stage{
		ring: r, log: r.log, name: spec.Name, layout: spec.Layout, dims: spec.Dims, most: settings.MaxBatchSize,
		settings: settings, batcher: b, since: time.Now(),
		timer: -1, wake: never, startTook: int64(time.Second), accounts: map[Process]batcher.Account{}, runningDeadline: never, leaseEnd: never, resumeAt: never,
	}
	s.inForce.Store(&settings)
	s.stats.init(settings.MaxBatchSize)
	if r.isPipeline {
		s.log = r.log.With("stage", spec.Name)
	}
	return s, nil
}

// Name is the name by which workers attach.
func (s *Stage) Name() string { return s.name }

// Signature is the signature of the stage's workers.
func (s *Stage) Signature() *tensor.Signature { return &s.layout.Signature }

// InForce is the policy in force. Any goroutine may call it.
func (s *Stage) InForce() *policy.Settings { return s.inForce.Load() }

// IsStaffed says whether a worker is attached. Any goroutine may call it.
func (s *Stage) IsStaffed() bool { return s.staffed.Load() }

// SetPolicy changes the policy, or refuses it. It is called on the loop.
func (s *Stage) SetPolicy(settings policy.Settings) error {
	settings.Slots = s.settings.Slots
	if most := s.most; settings.MaxBatchSize > most {
		return fmt.Errorf("%w: max_batch_size is %d, the ring was made for %d", status.ErrInvalid, settings.MaxBatchSize, most)
	}
	if err := CheckPrivate(&settings, s.layout.DeviceSize); err != nil {
		return err
	}
	if err := s.applyPolicy(settings); err != nil {
		return err
	}
	s.settings = settings
	s.inForce.Store(&settings)
	s.leaseEnd = s.loop.now // the loop looks at all leases again
	return nil
}

func (s *Stage) closeWorkers() {
	for _, w := range s.workers {
		if w != nil {
			w.closeSession(s.loop)
		}
	}
}

// touch marks the stage for a decision in this round, before the round's events are counted.
func (s *Stage) touch() {
	if !s.dirty {
		s.stats.rollSecond(s.loop.now, s.present)
		if s.ring.whole != nil {
			s.ring.whole.rollSecond(s.loop.now, 0)
		}
		s.dirty = true
		s.loop.dirty = append(s.loop.dirty, s)
	}
}

// updateLoop sets the stage's timer and its places on the loop's lists after a decision.
func (s *Stage) updateLoop() {
	s.dirty = false
	s.loop.timers.setTimer(s, min(s.wake, s.runningDeadline, s.leaseEnd, s.resumeAt))
	if active := s.batcher.Queued() > 0 || len(s.busy) > 0; active != s.active {
		s.active = active
		if active {
			s.loop.active++
		} else {
			s.loop.active--
		}
	}
	if !s.spins && s.waitsForMore() {
		s.spins = true
		s.loop.spinning = append(s.loop.spinning, s)
	}
}

// waitsForMore says that an idle worker waits for a batch, and the batch for further
// requests. These often follow at once, from clients whose answers came together.
func (s *Stage) waitsForMore() bool { return s.batcher.Queued() > 0 && s.batcher.IdleWorkers() > 0 }

// applyPolicy gives the batcher its policy. During a drain batches do not wait.
func (s *Stage) applyPolicy(p policy.Settings) error {
	if s.loop.draining {
		p.WaitTime, p.LatencyGoal = 0, 0
	}
	s.touch()
	return s.batcher.SetPolicy(p)
}

func (s *Stage) clientJoined(c *ClientSession) {
	s.batcher.ClientJoined(batcher.ClientID(c.first))
	if !c.hasSibling() {
		s.batcher.Resume(batcher.Time(s.loop.now), batcher.ClientID(c.first), s.accounts[c.Process])
	}
	s.touch()
}

// keepAccount keeps the account of a client that leaves, for a process that attaches again.
// A session beside others is not charged for them: a gateway has one for each kind of caller.
func (s *Stage) keepAccount(c *ClientSession) {
	now := batcher.Time(s.loop.now)
	maps.DeleteFunc(s.accounts, func(_ Process, a batcher.Account) bool { return a.IsPaid(now) })
	if a := s.batcher.AccountOf(batcher.ClientID(c.first)); a.IsWorse(s.accounts[c.Process]) {
		s.accounts[c.Process] = a
	}
}

// cancelQueuedOf cancels at most that many queued requests of a leaving client. It
// returns their number, and whether they were the last.
func (s *Stage) cancelQueuedOf(c *ClientSession, most int) (n int, out bool) {
	s.touch()
	ids := s.batcher.CancelWaiting(batcher.ClientID(c.first), most)
	for _, id := range ids {
		s.ring.settle(uint32(id), abandoned, ending{code: status.ErrCanceled})
	}
	if out = len(ids) < most; out {
		s.batcher.ClientLeft(batcher.ClientID(c.first))
	}
	return len(ids), out
}

// maxClockSkew bounds how far back a commit may claim to have happened.
const maxClockSkew = time.Second

// admitRequest takes a client's request of that many rows into the queue, or refuses it.
func (s *Stage) admitRequest(info *slotInfo, rows uint32) status.Code {
	e, now := &info.commit, s.loop.now
	// A damaged time would bend the wait of other requests.
	e.Committed = min(max(e.Committed, now-int64(maxClockSkew)), now)
	info.arrived = e.Committed
	code := status.OK
	switch {
	case s.loop.draining:
		code = status.ErrDraining
	case rows != e.Rows:
		code = status.ErrTooLarge
	}
	for n := s.next; n != nil && code == status.OK; n = n.next { // a later stage would refuse it
		code = n.refusesRequest(e)
	}
	if code != status.OK {
		s.stats.requests++
		s.arrived = now
		return code
	}
	return s.takeRequest(info)
}

// refusesRequest says why the stage cannot take a request, however long its queue is.
func (s *Stage) refusesRequest(e *shm.Commit) status.Code {
	switch {
	case int(e.Rows) > s.settings.MaxBatchSize:
		return status.ErrTooLarge
	case s.refusesWithoutWorker():
		return status.ErrNoWorker
	}
	return status.OK
}

// takeRequest queues a request of a client or the previous stage, or refuses it.
func (s *Stage) takeRequest(info *slotInfo) status.Code {
	e, now := &info.commit, s.loop.now
	s.stats.requests++
	s.arrived = now
	if at := batcher.DeadlineOf(&s.settings, int(e.Level), batcher.Time(info.arrived), deadlineOf(e)); at != batcher.Never {
		e.Deadline = int64(at)
	}
	if code := s.refusesRequest(e); code != status.OK {
		return code
	}
	if s.present == 0 && s.staffing.Want != nil {
		s.staffing.Want()
	}
	err := s.batcher.Arrive(batcher.Time(now), s.describeRequest(info))
	if code, named := arriveStatuses[err]; named || err == nil {
		return code
	}
	return status.ErrInvalid
}

func (s *Stage) describeRequest(info *slotInfo) batcher.Request {
	dims := s.sizesOf(info)
	cost := int(info.commit.Cost)
	if s.settings.Ragged {
		if cost == 0 {
			cost = int(dims[s.settings.Cost])
		}
		dims = batcher.Dims{} // all sizes are one shape
	}
	q := batcher.Request{
		ID: batcher.RequestID(info.head), Client: batcher.ClientID(info.client.first), Rows: int(info.commit.Rows),
		Level: int(info.commit.Level), Arrived: batcher.Time(info.arrived), Deadline: deadlineOf(&info.commit), Dims: dims,
		Cost: cost,
	}
	if info.troubled {
		t := s.ring.troubles[info.head]
		q.Share, q.Avoid = t.share, t.avoidedWorker()
	}
	return q
}

// sizesOf is the sizes of the variable dimensions of the stage's inputs.
func (s *Stage) sizesOf(info *slotInfo) batcher.Dims {
	if !s.ring.isPipeline {
		return info.commit.Dims
	}
	return s.ownSizesOf(info)
}

// ownSizesOf picks a stage's sizes from those of all stages, which a pipeline's commits
// have. It is a separate function so that sizesOf is inlined.
func (s *Stage) ownSizesOf(info *slotInfo) (dims batcher.Dims) {
	for i, from := range s.dims {
		dims[i] = info.commit.Dims[from]
	}
	return dims
}

// countEnd counts a request that ends at the stage; goesOn says that the next stage gets it.
func (s *Stage) countEnd(info *slotInfo, e ending, byWorker, goesOn bool) {
	whole, now := s.ring.whole, s.loop.now
	if whole != nil && !goesOn {
		whole.countEnd(e.code)
	}
	switch {
	case !byWorker:
		s.stats.countEnd(e.code)
		return
	case e.started == 0: // its times are only on the board
		s.stats.countAnswered(info, e.code, now)
		e.started, e.finished = s.timesOnBoard(info)
	default:
		s.stats.countFinished(info, e.code, e.started, e.finished)
		now = e.finished
	}
	if whole != nil && !goesOn {
		whole.total.Add(time.Duration(now - info.commit.Committed))
	}
	if s.recorder.takesMore() && info.worker != nil { // nil: a worker answered a request that no worker had
		s.recordRequest(info, e.code, e.started, e.finished)
	}
}

func deadlineOf(e *shm.Commit) batcher.Time {
	if e.Deadline > 0 {
		return batcher.Time(e.Deadline)
	}
	return batcher.Never
}

// arriveStatuses are the ends of requests that the batcher refuses.
var arriveStatuses = map[error]status.Code{
	batcher.ErrTooLarge: status.ErrTooLarge, batcher.ErrQueueFull: status.ErrQueueFull, batcher.ErrNoLevel: status.ErrNoLevel,
	batcher.ErrExpired: status.ErrExpired, batcher.ErrLate: status.ErrOverloaded, batcher.ErrTooLong: status.ErrShape,
}
