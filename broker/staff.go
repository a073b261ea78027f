// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/broker/staffing"
	"github.com/ringbatch/ringbatch/broker/supervise"
)

// staff carries out the rules of package staffing for the models whose workers the broker
// starts. One goroutine looks at the models when a request wants workers, when workers came
// or left, and when time has passed. Its lock is never taken on a loop.
type staff struct {
	*Broker
	poke chan struct{} // a look is due; holds one

	mu     sync.Mutex
	list   []*staffed // in the order of their declaration
	always *staffed   // the workers of no model; it is not in list
}

// staffed is a model of which the broker starts the workers. The staff's lock guards it.
type staffed struct {
	m      *model
	idle   time.Duration // without requests, before it sleeps; 0: it does not by itself
	keep   bool
	groups []supervise.Group // one for each stage, as they are after all changes
	follow []staffing.Follower

	changes  int            // under way, each until settle
	held     staffing.Bytes // before them; these processes may still run
	resizing sync.WaitGroup
	resizes  int
	byHand   bool // a command wants it awake

	taken     map[[2]int]int64 // measured, by group and declaration, of those that declare no memory; groups has it, too
	measureAt staffing.Time    // next
	measuring bool
	warned    bool // of memory, in this life

	asked atomic.Bool // a request, or a command, wants it awake; set on loops

	state  staffing.State
	since  staffing.Time // of the state
	began  staffing.Time // of its last start
	why    string        // of the state
	waits  bool          // for room
	holder string        // the models that hold that room, as text
	failed string        // why its start failed; "" after failPause
	failAt staffing.Time
	used   staffing.Time // its last request
	busy   bool
	loads  []engine.Load

	wakes, sleeps, failures uint64
	took, longest           time.Duration // of its starts
}

const (
	failPause    = 10 * time.Second       // after a failed start, before a request starts workers again
	lookTime     = 500 * time.Millisecond // between looks at a load, or at who may yield
	turningTime  = 50 * time.Millisecond  // between looks at a model that wakes
	longestPause = time.Minute
)

func newStaff(b *Broker) *staff {
	always := &staffed{keep: true, groups: []supervise.Group{{Workers: b.cfg.Workers}}}
	return &staff{Broker: b, poke: make(chan struct{}, 1), always: always}
}

func (b *Broker) clock() staffing.Time { return time.Since(b.started) }

// wantLook has the staff look soon. Any goroutine may call it.
func (s *staff) wantLook() {
	select {
	case s.poke <- struct{}{}:
	default:
	}
}

// declare enters a model, before its groups are started, or changes its declaration. Then it
// returns the model, to settle after the change of its groups. The loops run.
func (s *staff) declare(m *model, mc *ModelConfig) (changed *staffed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	groups := mc.workerGroups()
	x := s.find(m)
	switch {
	case x != nil:
		changed = x
		s.hold(x)
		s.setGroups(x, x.fit(groups))
	case countWorkers(groups) == 0:
		return nil
	default:
		x = &staffed{m: m, state: staffing.Awake, follow: make([]staffing.Follower, len(groups)), used: s.clock(), since: s.clock(),
			began: s.clock(), why: "it was declared"}
		s.setGroups(x, groups)
		fromZero := slices.ContainsFunc(groups, func(g supervise.Group) bool {
			return slices.ContainsFunc(g.Workers, func(w supervise.Worker) bool { return w.Most > 0 && w.Least == 0 })
		})
		switch {
		case fromZero || !staffing.Fits(s.budgets(), s.needs(x), s.tenants()):
			x.state = staffing.Asleep
		case mc.Idle > 0 || len(s.needs(x)) > 0:
			x.state = staffing.Waking
		}
		s.list = append(s.list, x)
		if x.state == staffing.Asleep {
			s.super.Sleep(x.names()...)
		} else {
			s.super.Wake(x.names()...) // it may have slept under an earlier configuration
		}
		defer s.informRing(x)
	}
	x.idle, x.keep = mc.Idle, mc.Keep
	s.wantLook()
	return changed
}

// declareAlways changes the workers of no model, like declare.
func (s *staff) declareAlways(workers []supervise.Worker) *staffed {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hold(s.always)
	s.setGroups(s.always, []supervise.Group{{Workers: workers}})
	return s.always
}

// hold begins a change of a model's declarations.
func (s *staff) hold(x *staffed) {
	x.held = s.needs(x)
	x.changes++
}

// settle ends a change. After the last one it takes what the supervisor has: a change may have
// failed. x may be nil.
func (s *staff) settle(x *staffed) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if x != nil {
		s.endChange(x)
	}
}

func (s *staff) endChange(x *staffed) {
	if x.changes--; x.changes > 0 {
		return
	}
	groups := slices.Clone(x.groups)
	for i := range groups {
		groups[i].Workers = s.super.Declared(groups[i].Model)
	}
	x.held = nil
	s.setGroups(x, groups)
	if x != s.always && countWorkers(groups) == 0 {
		s.list = slices.DeleteFunc(s.list, func(y *staffed) bool { return x == y })
		x.m.onDemand.Store(false)
		x.m.ring.SetStaffing(engine.Staffing{})
	}
	s.wantLook()
}

func countWorkers(groups []supervise.Group) (n int) {
	for i := range groups {
		n += len(groups[i].Workers)
	}
	return n
}

// fit is other declarations of a model with the instances that a change leaves it.
func (x *staffed) fit(groups []supervise.Group) []supervise.Group {
	groups = slices.Clone(groups)
	for i := range groups {
		was, w := x.groups[i].Workers, groups[i].Workers
		if x.state != staffing.Asleep && len(was) > 0 && len(w) > 0 && w[0].Most > 0 {
			next := w[0]
			next.Instances = min(max(was[0].Instances, w[0].Instances), w[0].Most)
			groups[i].Workers = []supervise.Worker{next}
		}
	}
	return groups
}

// declareAll declares the models of the configuration. Those that stay get room first, then
// the others in their order.
func (s *staff) declareAll() {
	made := s.models.listModels()
	for _, stays := range []bool{true, false} {
		for i := range s.cfg.Models {
			if mc := &s.cfg.Models[i]; mc.stays() == stays {
				s.declare(made[slices.IndexFunc(made, func(m *model) bool { return m.name == mc.Name })], mc)
			}
		}
	}
}

func (s *staff) find(m *model) *staffed {
	for _, x := range s.list {
		if x.m == m {
			return x
		}
	}
	return nil
}

// stays says that the model does not sleep for others.
func (x *staffed) stays() bool { return x.keep || x.m.layout.DeviceSize > 0 }

// names are the supervisor's names of the model.
func (x *staffed) names() (list []string) {
	for i := range x.groups {
		list = append(list, x.groups[i].Model)
	}
	return list
}

// run looks until ctx ends.
func (s *staff) run(ctx context.Context) {
	next := time.NewTimer(0)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.handedTo:
			return
		case <-s.poke:
		case <-next.C:
		}
		next.Reset(s.look())
	}
}

// look brings all models on, and returns after what time to look again.
func (s *staff) look() (pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, pause := s.clock(), longestPause
	again := func(d time.Duration) { pause = min(pause, max(d, time.Millisecond)) }
	waiting := false
	for _, x := range s.list {
		switch x.state {
		case staffing.Asleep:
			if x.failed != "" && now >= x.failAt+failPause {
				x.failed = ""
				s.informRing(x)
			}
			if x.failed != "" {
				x.asked.Store(false)
				again(x.failAt + failPause - now)
			} else if (x.asked.Load() || x.stays()) && !x.waits {
				x.waits, x.since = true, now
			}
			waiting = waiting || x.waits
		case staffing.Waking:
			s.lookAtStart(x, now)
			again(turningTime)
		case staffing.Awake:
			if len(x.taken) > 0 {
				again(s.measureInTime(x, now))
			}
			if due := x.used + x.idle; x.idle > 0 {
				if now >= due {
					x.observe(now)
				}
				if due = x.used + x.idle; now >= due && !x.busy {
					s.sleep(x, now, fmt.Sprintf("idle for %v", x.idle))
					break
				}
				again(max(due-now, turningTime))
			}
			if s.followLoad(x, now) {
				again(lookTime)
			}
		}
	}
	if waiting {
		s.shareRoom(now)
		again(lookTime)
	}
	return pause
}

// observe asks the model's loop for its load.
func (x *staffed) observe(now staffing.Time) {
	x.loads, _ = x.m.ring.Loads()
	x.busy = false
	for i := range x.loads {
		l := &x.loads[i]
		if x.busy = x.busy || l.Queued > 0 || l.Busy > 0; x.busy {
			x.used = now
		}
		x.used = max(x.used, now-l.Idle)
	}
}

func (s *staff) lookAtStart(x *staffed, now staffing.Time) {
	if x.m.isStaffed() {
		x.took = now - x.began
		x.longest = max(x.longest, x.took)
		x.wakes++
		x.used = max(x.used, now)
		s.move(x, staffing.Awake, now, x.why)
		return
	}
	for _, name := range x.names() {
		if why := s.super.Failing(name); why != "" {
			s.fail(x, now, why)
			return
		}
	}
}

// fail ends a start that does not succeed. Requests end as NoWorker until failPause is over.
func (s *staff) fail(x *staffed, now staffing.Time, why string) {
	x.failed, x.failAt = why, now
	x.failures++
	s.log.Error("model does not wake", "model", x.m.name, "why", why)
	s.sleep(x, now, why)
}

// sleep ends a model's workers. Requests that come meanwhile run, or wait for the next start.
func (s *staff) sleep(x *staffed, now staffing.Time, why string) {
	x.asked.Store(false)
	x.byHand = false
	x.sleeps++
	x.changes++
	s.move(x, staffing.Ending, now, why)
	names := x.names()
	go func() {
		s.super.Sleep(names...)
		x.resizing.Wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		clear(x.follow)
		s.move(x, staffing.Asleep, s.clock(), x.why)
		s.endChange(x)
	}()
}

// wake starts a model's workers.
func (s *staff) wake(x *staffed, now staffing.Time) {
	why := "a request came"
	switch {
	case x.byHand:
		why = "by hand"
	case x.stays():
		why = "it always runs"
	}
	x.waits, x.byHand, x.holder, x.began, x.used = false, false, "", now, now
	x.measureAt, x.warned = 0, false
	x.asked.Store(false)
	s.move(x, staffing.Waking, now, why)
	s.super.Wake(x.names()...)
}

func (s *staff) move(x *staffed, to staffing.State, now staffing.Time, why string) {
	x.state, x.since, x.why = to, now, why
	s.log.Info("model is "+to.String(), "model", x.m.name, "why", why)
	s.informRing(x)
	s.models.changes.noteChange()
}

// informRing gives the model's loop the new way in which its requests get workers.
func (s *staff) informRing(x *staffed) {
	x.m.onDemand.Store(x.state != staffing.Awake && x.failed == "")
	f := engine.Staffing{}
	switch {
	case x.state == staffing.Awake:
	case x.failed != "":
		f.Failed, f.Why = true, x.failed
	default:
		f.Want = func() { // on the loop
			if !x.asked.Swap(true) {
				s.wantLook()
			}
		}
		f.Why = "its workers were starting"
		if x.holder != "" {
			f.Why = x.holder
		}
	}
	x.m.ring.SetStaffing(f)
}

// tenants are the models as the rule of room sees them. The caller has observed them.
func (s *staff) tenants() (list []staffing.Tenant) {
	for _, x := range s.list {
		t := staffing.Tenant{
			Name: x.m.name, State: x.state, Needs: s.needs(x), Stays: x.stays(), Waits: x.waits,
			Since: x.since, Used: x.used, Busy: x.busy, Took: x.took,
		}
		if x.state == staffing.Awake {
			t.Since = x.began
		}
		list = append(list, t)
	}
	return list
}

// bound is the part of b on GPUs with a budget.
func (s *staff) bound(b staffing.Bytes) staffing.Bytes {
	maps.DeleteFunc(b, func(gpu int, _ int64) bool {
		_, has := s.cfg.GPUMemory[gpu]
		return !has
	})
	return b
}

// shareRoom wakes models that wait, and has others sleep for them. A model whose requests
// have ended meanwhile waits no longer.
func (s *staff) shareRoom(now staffing.Time) {
	for _, x := range s.list {
		switch {
		case x.waits:
			x.asked.Store(false) // a request that comes after the look below sets it again
			if x.observe(now); !x.busy && !x.byHand && !x.stays() {
				x.waits, x.holder = false, ""
			}
		case x.state == staffing.Awake && len(s.needs(x)) > 0:
			x.observe(now)
		}
	}
	p := staffing.Room(now, s.budgets(), s.tenants())
	for _, x := range s.list {
		switch name := x.m.name; {
		case slices.Contains(p.Wake, name):
			s.wake(x, now)
		case !slices.Contains(p.Sleep, name) || x.state == staffing.Ending:
		case x.state == staffing.Waking:
			s.fail(x, now, fmt.Sprintf("no worker came in %v, and others waited for the room", now-x.began))
		default:
			s.sleep(x, now, "another model needs the room")
		}
		if holder := p.Holders[x.m.name]; holder != "" && x.waits {
			s.endExtras(s.needs(x))
			if holder != x.holder {
				x.holder = holder
				s.informRing(x)
			}
		}
	}
}

// endExtras ends workers above the least number, which hold room that another model needs.
func (s *staff) endExtras(needed staffing.Bytes) {
	for _, y := range s.list {
		for i := range y.groups {
			w := y.groups[i].Workers
			if y.state != staffing.Awake || y.resizes > 0 || len(w) == 0 || w[0].Most == 0 || w[0].Instances <= max(1, w[0].Least) {
				continue
			}
			for gpu := range needs(&w[0], w[0].Instances) {
				if needed[gpu] > 0 {
					s.resize(y, i, max(1, w[0].Least))
					break
				}
			}
		}
	}
}

// followLoad changes the number of workers of the stages that have a range. It returns
// false if there is none.
func (s *staff) followLoad(x *staffed, now staffing.Time) (follows bool) {
	for i := range x.groups {
		w := x.groups[i].Workers
		if len(w) == 0 || w[0].Most <= max(1, w[0].Least) {
			continue
		}
		if !follows {
			x.observe(now)
		}
		follows = true
		if i >= len(x.loads) || x.resizes > 0 {
			continue
		}
		work, have := x.loads[i].Work, w[0].Instances
		work.Goal = x.m.stages[i].InForce().LatencyGoal
		want := x.follow[i].Decide(now, &work, have, w[0].Least, w[0].Most)
		if s.isUnknown(&w[0]) {
			want = min(want, have)
		}
		for want > have {
			more := needs(&w[0], want)
			for gpu, bytes := range needs(&w[0], have) {
				more[gpu] -= bytes
			}
			if staffing.Fits(s.budgets(), s.bound(more), s.tenants()) {
				break
			}
			want--
		}
		if want != have {
			s.resize(x, i, want)
		}
	}
	return follows
}

func (s *staff) resize(x *staffed, i, want int) {
	name, w := x.groups[i].Model, &x.groups[i].Workers[0]
	s.log.Info("workers follow the load", "model", name, "from", w.Instances, "to", want)
	s.hold(x)
	w.Instances = want
	x.resizes++
	x.resizing.Add(1)
	go func() {
		s.super.Resize(name, want)
		x.resizing.Done()
		s.mu.Lock()
		defer s.mu.Unlock()
		x.resizes--
		s.endChange(x)
	}()
}
