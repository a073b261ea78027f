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
	healthy float64              // hosts that serve during the fault
	fault   func(w *world) error // begins it
	repair  func(w *world) error // ends it
	lasts   time.Duration
}

var campaigns = []*campaign{
	{name: "none", short: true, healthy: 3},
	{name: "kill", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].signal(syscall.SIGKILL); return nil },
		repair: func(w *world) error { return w.hosts[0].boot() }, lasts: 6 * time.Second},
	{name: "stop", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].signal(syscall.SIGSTOP); return nil },
		repair: func(w *world) error { w.hosts[0].signal(syscall.SIGCONT); return nil }, lasts: 6 * time.Second},
	{name: "partition", healthy: 2, fault: func(w *world) error { return w.hosts[0].link("down") },
		repair: func(w *world) error { return w.hosts[0].link("up") }, lasts: 6 * time.Second},
	{name: "bad_link", healthy: 2, fault: func(w *world) error { return w.hosts[0].disturb("50ms", "1%") },
		repair: func(w *world) error { return w.hosts[0].disturb("0ms", "0%") }, lasts: 6 * time.Second},
	{name: "rolling", healthy: 2, fault: rollingUpgrade},
	{name: "slow", healthy: 2.1, fault: func(w *world) error { return w.hosts[0].processes["worker"].Send(10) },
		repair: func(w *world) error { return w.hosts[0].processes["worker"].Send(1) }, lasts: 6 * time.Second},
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

// errNoNetem skips bad_link, which then does not count as passed.
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
	var struck, repaired time.Time
	if c.fault != nil {
		w.pause(before)
		struck = time.Now()
		if err := c.fault(w); err != nil {
			return err
		}
		w.pause(lasts)
		repaired = time.Now()
		if c.repair != nil {
			if err := c.repair(w); err != nil {
				return err
			}
		}
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return c.judge(o, reports, stalls, begin, struck, repaired)
}

// lateEnds may happen on a machine that stood still: deadlines passed or could not be
// met, and hosts seemed dead.
var lateEnds = []string{status.ErrExpired.Name(), status.ErrOverloaded.Name(), status.ErrWorkerDied.Name()}

// judge checks that no request was lost and that the throughput came back. A lost,
// wrong or second answer counts on any machine; a late answer only while the machine
// let processes run.
func (c *campaign) judge(o *options, reports []*report, stalls *testbed.Stalls, begin, struck, repaired time.Time) error {
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
	if share, known := c.throughput(reports, struck, repaired); known {
		text += fmt.Sprintf("; from 2 s after the fault on %.0f %% of the healthy hosts' throughput", 100*share)
		if isBusy(stalls, struck.Add(-reference), repaired.Add(recovery+reference)) {
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
	stoodStill = time.Second / 2       // for one process: half of a relay's patience with a host
	busy       = 20 * time.Millisecond // half of a batch's time
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

// The throughput from recovery on, while the fault lasts, is compared with the
// reference before it and after its end.
const (
	recovery  = 2 * time.Second
	reference = 3 * time.Second
)

// throughput from two seconds after the fault to its end, as a share of the healthy
// hosts' throughput before and after it in the same run.
func (c *campaign) throughput(reports []*report, struck, repaired time.Time) (float64, bool) {
	if struck.IsZero() || repaired.Sub(struck) < recovery+time.Second {
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
	if after := between(repaired.Add(recovery), repaired.Add(recovery+reference)); after > 0 { // else the requests were all sent
		was = (was + after) / 2
	}
	is := between(struck.Add(recovery), repaired)
	if was == 0 || is == 0 {
		return 0, false
	}
	return is / (was * c.healthy / gpuHosts), true
}
