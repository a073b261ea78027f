package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"time"
)

// run is one campaign under way: its random numbers, its host and its score.
type run struct {
	name   string
	events int
	dir    string
	host   *host

	mu             sync.Mutex
	rng            *rand.Rand
	passed, failed int
	done           int
	shown          time.Time
	start          time.Time
	spans          map[string][]time.Duration
}

func newRun(name string, seed uint64, events int) *run {
	dir, err := os.MkdirTemp("", "ringbatch-chaos-")
	if err != nil {
		panic(err)
	}
	salt := uint64(0)
	for _, c := range name {
		salt = salt*31 + uint64(c)
	}
	return &run{name: name, events: events, dir: dir, start: time.Now(), shown: time.Now(),
		rng: rand.New(rand.NewPCG(seed, salt)), spans: map[string][]time.Duration{}}
}

func (r *run) socket() string { return filepath.Join(r.dir, "broker.sock") }

// close ends what is left of the host and reports.
func (r *run) close() {
	if r.host != nil {
		r.host.close()
	}
	_ = os.RemoveAll(r.dir)
	names := make([]string, 0, len(r.spans))
	for name := range r.spans {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		d := r.spans[name]
		sort.Slice(d, func(i, j int) bool { return d[i] < d[j] })
		q := func(p float64) time.Duration { return d[min(len(d)-1, int(p*float64(len(d))))].Round(time.Microsecond) }
		fmt.Printf("   %s: n %d, p50 %v, p99 %v, max %v\n", name, len(d), q(0.5), q(0.99), q(1))
	}
	fmt.Printf("   %s: %d passed, %d failed in %v\n", r.name, r.passed, r.failed, time.Since(r.start).Round(time.Second))
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

func (r *run) pass() { r.score(true, "") }

func (r *run) fail(format string, a ...any) { r.score(false, fmt.Sprintf(format, a...)) }

// check passes or fails.
func (r *run) check(ok bool, format string, a ...any) {
	if ok {
		r.pass()
	} else {
		r.fail(format, a...)
	}
}

func (r *run) score(ok bool, what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if ok {
		r.passed++
		return
	}
	if r.failed++; r.failed <= 20 {
		fmt.Printf("   FAILED: %s\n", what)
	}
}

func (r *run) span(name string, d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.spans[name] = append(r.spans[name], d)
}

// inTime checks that 99 % of what was measured stays within a bound; in a
// short run 90 % within ten times as much: a busy machine must not fail it,
// only something that is stuck.
func (r *run) inTime(name string, bound time.Duration) {
	r.mu.Lock()
	d := append([]time.Duration(nil), r.spans[name]...)
	r.mu.Unlock()
	if len(d) == 0 {
		return
	}
	sort.Slice(d, func(i, j int) bool { return d[i] < d[j] })
	percent := 99
	if len(d) < 1000 {
		percent, bound = 90, 10*bound
	}
	got := d[min(len(d)-1, len(d)*percent/100)]
	r.check(got <= bound, "%s: p%d is %v, at most %v allowed", name, percent, got, bound)
}

// progress shows, now and then, how far a campaign is.
func (r *run) progress(done int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done = done
	if time.Since(r.shown) < 5*time.Second {
		return
	}
	r.shown = time.Now()
	fmt.Printf("   %s: %d of %d, %d passed, %d failed, %v\n", r.name, done, r.events, r.passed, r.failed, time.Since(r.start).Round(time.Second))
}
