// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/internal/cputime"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// score counts checks.
type score struct{ passed, failed, unjudged int }

func (s *score) add(t score) {
	s.passed += t.passed
	s.failed += t.failed
	s.unjudged += t.unjudged
}

func (s score) String() string {
	text := fmt.Sprintf("%d passed, %d failed", s.passed, s.failed)
	if s.unjudged > 0 {
		text += fmt.Sprintf(", %d not judged", s.unjudged)
	}
	return text
}

// run is one campaign under way: its random numbers, its processes and its
// score.
type run struct {
	name   string
	events int
	ctx    context.Context
	bed    *testbed.Bed
	stalls *testbed.Stalls
	over   chan struct{} // ends the stalls
	born   time.Time
	began  cpuTimes

	mu    sync.Mutex
	rng   *rand.Rand
	score score
	shown time.Time
	done  int // events so far
	spans map[string][]time.Duration
}

func newRun(ctx context.Context, name string, seed uint64, events int) (*run, error) {
	bed, err := testbed.New(ctx)
	if err != nil {
		return nil, err
	}
	salt := uint64(0)
	for _, c := range name {
		salt = salt*31 + uint64(c)
	}
	r := &run{name: name, events: events, ctx: ctx, bed: bed, over: make(chan struct{}), born: time.Now(), shown: time.Now(),
		rng: rand.New(rand.NewPCG(seed, salt)), spans: map[string][]time.Duration{}}
	r.stalls = testbed.WatchStalls(r.over, true)
	r.began = r.cpuTimes()
	return r, nil
}

// cpuTimes is the CPU time of this machine and of this program so far.
type cpuTimes struct{ machine, own time.Duration }

func (r *run) cpuTimes() cpuTimes {
	machine, err := cputime.Machine()
	if err != nil {
		r.fail("%v", err)
	}
	return cpuTimes{machine, r.bed.CPUTime()}
}

// others is the share of this machine, in percent, that other programs have
// used since the campaign began.
func (r *run) others() int {
	now := r.cpuTimes()
	used := now.machine - r.began.machine - (now.own - r.began.own)
	return int(100 * used / (time.Since(r.born) * time.Duration(runtime.NumCPU())))
}

func (r *run) socket() string { return r.bed.Path("broker.sock") }

// close ends the remaining processes and prints the measured times and the score.
func (r *run) close() {
	r.bed.Close()
	left, err := testbed.Children()
	r.check(err == nil && len(left) == 0, "processes are left behind: %v, %v", left, err)
	close(r.over)
	for _, name := range slices.Sorted(maps.Keys(r.spans)) {
		d := r.spans[name]
		slices.Sort(d)
		fmt.Printf("   %s: n %d, p50 %v, p99 %v, max %v\n", name, len(d),
			quantile(d, 50).Round(time.Microsecond), quantile(d, 99).Round(time.Microsecond), quantile(d, 100).Round(time.Microsecond))
	}
	fmt.Printf("   %s: %s in %v\n", r.name, r.score, time.Since(r.born).Round(time.Second))
}

// quantile is the smallest of the sorted times that at least percent of them do
// not exceed.
func quantile(d []time.Duration, percent int) time.Duration {
	return d[max(0, (len(d)*percent+99)/100-1)]
}

func (r *run) intn(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rng.IntN(n)
}

func (r *run) seed() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rng.Uint64()
}

func (r *run) pass() { r.check(true, "") }

func (r *run) fail(format string, a ...any) { r.check(false, format, a...) }

// broken is why a campaign, or one event of it, cannot go on.
type broken struct{ error }

// must ends the campaign, or the event, if there is an error.
func (r *run) must(err error) {
	if err != nil {
		panic(broken{err})
	}
}

// guard runs f, which may end early at must.
func (r *run) guard(f func()) {
	defer func() {
		switch e := recover().(type) {
		case nil:
		case broken:
			r.fail("%s: %v", r.name, e.error)
		default:
			panic(e)
		}
	}()
	f()
}

func (r *run) start(s testbed.Spec) *testbed.Process {
	p, err := r.bed.Start(s)
	r.must(err)
	return p
}

func (r *run) usage(p *testbed.Process) testbed.Usage {
	u, err := testbed.UsageOf(p.Pid())
	r.must(err)
	return u
}

// check passes or fails.
func (r *run) check(ok bool, format string, a ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.ctx.Err() != nil: // everything is being ended
	case ok:
		r.score.passed++
	default:
		if r.score.failed++; r.score.failed <= 20 {
			fmt.Printf("   FAILED: %s\n", fmt.Sprintf(format, a...))
		}
	}
}

// notJudged counts a check without enough evidence.
func (r *run) notJudged(format string, a ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.score.unjudged++
	fmt.Printf("   not judged: %s\n", fmt.Sprintf(format, a...))
}

// busyMachine is the share of other programs, in percent, at which a time that
// is too long proves nothing.
const busyMachine = 10

// quick checks a time, which counts only on a machine without other work.
func (r *run) quick(ok bool, format string, a ...any) {
	if others := r.others(); !ok && others >= busyMachine {
		r.notJudged(format+"; but other programs used %d %% of this machine", append(a, others)...)
		return
	}
	r.check(ok, format, a...)
}

// span keeps how long something took.
func (r *run) span(name string, from, to time.Time) {
	if r.stalls.Longest(from, to) > 0 {
		name += ", while the machine stood still"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spans[name] = append(r.spans[name], to.Sub(from))
}

// enough is how many samples a judgement takes.
const enough = 100

// few reports whether there are too few of them to judge.
func (r *run) few(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.spans[name]) < enough
}

func (r *run) median(name string) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return quantile(slices.Sorted(slices.Values(r.spans[name])), 50)
}

// inTime checks that 99 % of the measured times stay within a bound; 90 % in a
// short run, whose p99 is the slowest one or two.
func (r *run) inTime(name string, bound time.Duration) {
	if r.few(name) {
		r.notJudged("%s: %d samples are too few to judge", name, len(r.spans[name]))
		return
	}
	d := slices.Sorted(slices.Values(r.spans[name]))
	percent := 99
	if len(d) < 3*enough {
		percent = 90
	}
	got := quantile(d, percent)
	r.quick(got <= bound, "%s: p%d is %v, at most %v allowed", name, percent, got, bound)
}

// width is how many events run at once.
const width = 3

// parallel runs n events, a few at a time.
func (r *run) parallel(n, width int, event func()) {
	var next, done atomic.Int64
	done.Store(int64(r.done)) // there may have been others before
	var wg sync.WaitGroup
	for range width {
		wg.Go(func() {
			for next.Add(1) <= int64(n) && r.ctx.Err() == nil {
				r.guard(event)
				r.progress(int(done.Add(1)))
			}
		})
	}
	wg.Wait()
}

// untilEnough runs the campaign's events, and then more if that left too few
// samples to judge.
func (r *run) untilEnough(samples string, event func()) {
	r.parallel(r.events, width, event)
	for more := 0; more < 3 && r.few(samples) && r.events >= enough; more++ {
		r.parallel(enough, width, event)
	}
}

// progress shows, every few seconds, how far a campaign is.
func (r *run) progress(done int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = max(r.done, done)
	if time.Since(r.shown) < 5*time.Second {
		return
	}
	r.shown = time.Now()
	fmt.Printf("   %s: %d of %d, %s, %v\n", r.name, done, r.events, r.score, time.Since(r.born).Round(time.Second))
}
