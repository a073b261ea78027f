// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// campaign is one fault while two hosts send.
type campaign struct {
	name    string
	short   bool                 // part of the short version
	healthy float64              // hosts' worth of throughput that is left during the fault
	fault   func(w *world) error // begins it
	mend    func(w *world) error // ends it
	lasts   time.Duration
}

var campaigns = []*campaign{
	{name: "none", short: true, healthy: 3},
	{name: "kill", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].signal(syscall.SIGKILL); return nil },
		mend: func(w *world) error { return w.hosts[0].boot() }, lasts: 6 * time.Second},
	{name: "stop", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].signal(syscall.SIGSTOP); return nil },
		mend: func(w *world) error { w.hosts[0].signal(syscall.SIGCONT); return nil }, lasts: 6 * time.Second},
	{name: "partition", healthy: 2, fault: func(w *world) error { return w.hosts[0].link("down") },
		mend: func(w *world) error { return w.hosts[0].link("up") }, lasts: 6 * time.Second},
	{name: "bad_link", healthy: 2, fault: func(w *world) error { return w.hosts[0].disturb("50ms", "1%") },
		mend: func(w *world) error { return w.hosts[0].disturb("0ms", "0%") }, lasts: 6 * time.Second},
	{name: "rolling", healthy: 2, fault: rollingUpgrade},
	{name: "slow", healthy: 2.1, fault: func(w *world) error { return w.hosts[0].processes["worker"].Send(10) },
		mend: func(w *world) error { return w.hosts[0].processes["worker"].Send(1) }, lasts: 6 * time.Second},
}

func campaignNames() (all []string) {
	for _, c := range campaigns {
		all = append(all, c.name)
	}
	return all
}

// rollingUpgrade ends and starts every GPU host, one after the other.
func rollingUpgrade(w *world) error {
	for _, h := range w.hosts[:gpuHosts] {
		h.shutDown()
		if err := h.boot(); err != nil {
			return err
		}
		w.pause(1500 * time.Millisecond)
	}
	return nil
}

// errNoNetem is why bad_link is left out, which is no pass.
var errNoNetem = errors.New("this kernel has no netem")

// play runs one campaign.
func (c *campaign) play(ctx context.Context, o *options) error {
	w, err := newWorld(ctx, o.verbose)
	if err != nil {
		return err
	}
	defer w.close()
	if c.name == "bad_link" && w.hosts[0].disturb("0ms", "0%") != nil {
		return errNoNetem
	}
	var jobs []*testbed.Process
	n := o.requests / producerHosts
	before, lasts, job := 6*time.Second, c.lasts, produceJob{Requests: n, Deadline: 5 * time.Second}
	if o.short { // CI's machine may have other things to do
		before, lasts, job.Deadline = time.Second, min(lasts, 2*time.Second), time.Minute
	}
	for i, h := range w.hosts {
		if i < gpuHosts {
			err = errors.Join(err, h.boot())
			continue
		}
		job.First = uint64(i * n)
		err = errors.Join(err, h.bootProducer())
		p, startErr := h.start("producer", testbed.Spec{Role: "producer", Job: job, Wrap: h.inside()})
		jobs, err = append(jobs, p), errors.Join(err, startErr)
	}
	if err != nil {
		return err
	}
	begin := time.Now()
	over := make(chan struct{})
	defer close(over)
	stalls := testbed.WatchStalls(over, true)
	reports := make([]*report, producerHosts)
	errs := make([]error, producerHosts)
	var all sync.WaitGroup
	for i, p := range jobs {
		reports[i] = &report{}
		all.Go(func() { errs[i] = p.Expect("report", reports[i], time.Hour) })
	}
	var struck, mended time.Time
	if c.fault != nil {
		w.pause(before)
		struck = time.Now()
		if err := c.fault(w); err != nil {
			return err
		}
		w.pause(lasts)
		mended = time.Now()
		if c.mend != nil {
			if err := c.mend(w); err != nil {
				return err
			}
		}
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return c.judge(o, reports, stalls, begin, struck, mended)
}

// lateEnds are how requests may end on a machine that stood still: deadlines
// passed or could not be met, and hosts seemed to have died.
var lateEnds = []string{status.ErrExpired.Name(), status.ErrOverloaded.Name(), status.ErrWorkerDied.Name()}

// judge says whether nothing was lost, and how the throughput came back. A lost,
// wrong or second answer counts on any machine. A late one counts where the
// machine let processes run.
func (c *campaign) judge(o *options, reports []*report, stalls *testbed.Stalls, begin, struck, mended time.Time) error {
	var late, excused, ended, tooLate int
	var slowest time.Duration
	ends, why := map[string]int{}, map[string]string{}
	for _, r := range reports {
		late, excused, slowest = late+r.Late, excused+r.Excused, max(slowest, r.Slowest)
		for end, n := range r.Ends {
			ends[end] += n
			ended += n
		}
		maps.Copy(why, r.Why)
	}
	var wrongs, notJudged []string
	say := func(format string, args ...any) { wrongs = append(wrongs, fmt.Sprintf(format, args...)) }
	worst := stalls.Longest(begin, time.Now())
	for end, n := range ends {
		switch {
		case end == endRight:
		case slices.Contains(lateEnds, end) && worst > stoodStill:
			tooLate += n
		default:
			say("%d requests: %s (%s)", n, end, why[end])
		}
	}
	if sent := o.requests / producerHosts * producerHosts; ended != sent {
		say("%d of %d requests ended", ended, sent)
	}
	if late > 0 {
		say("%d ended more than %v after their deadline, and the machine was not late by that much itself", late, graceful)
	}
	if tooLate > 0 {
		notJudged = append(notJudged, fmt.Sprintf("%d came too late, but the machine stood still", tooLate))
	}
	text := fmt.Sprintf("%-10s %d requests: %d right, %d wrong, %d late, slowest %.2f s; a process that sleeps woke up to %d ms late",
		c.name, ended, ends[endRight], ends[endWrong], late+excused, slowest.Seconds(), worst.Milliseconds())
	if share, known := c.throughput(reports, struck, mended); known {
		text += fmt.Sprintf("; from 2 s after the fault on %.0f %% of the healthy hosts' throughput", 100*share)
		if isBusy(stalls, struck.Add(-reference), mended.Add(recovery+reference)) {
			notJudged = append(notJudged, fmt.Sprintf("throughput: the machine kept processes waiting for more than %v too often", busy))
		} else if !o.short && share < 0.95 {
			say("throughput %.1f %% of that of the healthy hosts, want 95", 100*share)
		}
	}
	if len(notJudged) > 0 {
		text += "; NOT JUDGED: " + strings.Join(notJudged, ", ")
		o.notJudged++
	}
	fmt.Println(text)
	if len(wrongs) > 0 {
		return errors.New(strings.Join(wrongs, "; "))
	}
	return nil
}

// When a machine is too busy to judge by the clock.
const (
	stoodStill = time.Second / 2       // for one process: half of what a relay waits for a host
	busy       = 20 * time.Millisecond // half of what a batch takes
)

// isBusy reports whether processes had to wait in more than a fifth of the
// tenths of a second between two times.
func isBusy(stalls *testbed.Stalls, from, to time.Time) bool {
	slow, all := 0, 0
	for t := from; t.Before(to); t = t.Add(tenth) {
		all++
		if stalls.Longest(t, t.Add(tenth)) > busy {
			slow++
		}
	}
	return 5*slow > all
}

// Windows of the throughput: while the fault lasts, from recovery on, against
// the reference before it and after its end.
const (
	recovery  = 2 * time.Second
	reference = 3 * time.Second
)

// throughput from two seconds after the fault to its end, as a share of the
// healthy hosts' throughput in the same run, before it and after it: the machine
// may have more to do at one time than at another.
func (c *campaign) throughput(reports []*report, struck, mended time.Time) (float64, bool) {
	if struck.IsZero() || mended.Sub(struck) < recovery+time.Second {
		return 0, false
	}
	between := func(from, to time.Time) float64 {
		var sums []int
		for t := from; t.Before(to); t = t.Add(5 * tenth) { // a few batches each
			sum := 0
			for _, r := range reports {
				for j := range 5 {
					if k := int(t.Sub(r.Begin)/tenth) + j; k >= 0 && k < len(r.Answers) {
						sum += r.Answers[k]
					}
				}
			}
			sums = append(sums, sum)
		}
		if len(sums) == 0 {
			return 0
		}
		slices.Sort(sums)
		return float64(sums[len(sums)/2])
	}
	was := between(struck.Add(-reference), struck)
	if after := between(mended.Add(recovery), mended.Add(recovery+reference)); after > 0 { // else the requests were all sent
		was = (was + after) / 2
	}
	is := between(struck.Add(recovery), mended)
	if was == 0 || is == 0 {
		return 0, false
	}
	return is / (was * c.healthy / gpuHosts), true
}
