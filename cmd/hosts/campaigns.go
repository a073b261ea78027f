// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// campaign is one fault while two hosts send.
type campaign struct {
	name    string
	short   bool    // part of the short version
	healthy float64 // hosts' worth of throughput that is left during the fault
	cable   bool
	poison  int
	fault   func(w *world) error // begins it
	mend    func(w *world) error // ends it
	lasts   time.Duration
}

var campaigns = []*campaign{
	{name: "none", short: true, healthy: 3},
	{name: "kill", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].end(syscall.SIGKILL); return nil },
		mend: func(w *world) error { return w.hosts[0].reboot() }, lasts: 6 * time.Second},
	{name: "stop", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].signal(syscall.SIGSTOP); return nil },
		mend: func(w *world) error { w.hosts[0].signal(syscall.SIGCONT); return nil }, lasts: 6 * time.Second},
	{name: "partition", healthy: 2, fault: func(w *world) error { return w.hosts[0].link(false) },
		mend: func(w *world) error { return w.hosts[0].link(true) }, lasts: 6 * time.Second},
	{name: "bad_link", healthy: 2, cable: true, fault: func(w *world) error { return w.cable("50ms 0.01") },
		mend: func(w *world) error { return w.cable("0s 0") }, lasts: 6 * time.Second},
	{name: "rolling", healthy: 2, fault: rollingUpgrade},
	{name: "flapping", healthy: 2, fault: flap},
	{name: "slow", healthy: 2.1, fault: func(w *world) error { w.hosts[0].processes["worker"].Process.Signal(syscall.SIGUSR1); return nil },
		mend: func(w *world) error { return w.hosts[0].processes["worker"].Process.Signal(syscall.SIGUSR2) }, lasts: 6 * time.Second},
	{name: "poison", short: true, healthy: 2, poison: 10_000},
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
		h.end(syscall.SIGTERM)
		if err := h.reboot(); err != nil {
			return err
		}
		w.pause(1500 * time.Millisecond)
	}
	return nil
}

// flap kills a host again and again.
func flap(w *world) error {
	for range 5 {
		w.hosts[0].end(syscall.SIGKILL)
		w.pause(500 * time.Millisecond)
		if err := w.hosts[0].reboot(); err != nil {
			return err
		}
		w.pause(700 * time.Millisecond)
	}
	return nil
}

// play runs one campaign.
func (c *campaign) play(ctx context.Context, o *options) error {
	w, err := newWorld(ctx, o.verbose, c.cable && !canDelayHere())
	if err != nil {
		return err
	}
	defer w.close()
	if c.cable && !canDelayHere() {
		if err := w.plugCable(); err != nil {
			return err
		}
	}
	for _, h := range w.hosts[:gpuHosts] {
		if err := h.boot(); err != nil {
			return err
		}
		if c.poison > 0 {
			go h.keepWorker()
		}
	}
	for _, h := range w.hosts[gpuHosts:] {
		if err := h.bootProducer(); err != nil {
			return err
		}
	}
	poison := c.poison
	if poison > 0 && o.short {
		poison = 2000
	}
	deadline := "5s"
	if o.short { // CI's machine may have other things to do
		deadline = "60s"
	}
	var all sync.WaitGroup
	reports := make([]*report, producerHosts)
	errs := make([]error, producerHosts)
	for i, h := range w.hosts[gpuHosts:] {
		all.Go(func() {
			n := o.requests / producerHosts
			reports[i], errs[i] = h.produce("--count", fmt.Sprint(n), "--first", fmt.Sprint(i*n), "--poison", fmt.Sprint(poison), "--deadline", deadline)
		})
	}
	idle := newCanary(w.ctx)
	before := 6 * time.Second
	if o.short {
		before = time.Second
	}
	var struck, mended time.Time
	if c.fault != nil {
		w.pause(before)
		struck = time.Now()
		if err := c.fault(w); err != nil {
			return err
		}
		lasts := c.lasts
		if o.short {
			lasts = min(lasts, 2*time.Second)
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
	return c.judge(o, poison, reports, idle, struck, mended)
}

// keepWorker starts the worker again when it dies of an input, as a broker's
// supervisor would.
func (h *host) keepWorker() {
	for h.w.ctx.Err() == nil {
		c := h.processes["worker"]
		if c == nil || c.Process == nil {
			return
		}
		if _, err := c.Process.Wait(); err != nil || h.w.ctx.Err() != nil {
			return
		}
		args := h.args["worker"]
		if _, err := h.start("worker", args[0], args[1:]...); err != nil {
			return
		}
	}
}

// allowance says when a request may end in some way.
type allowance int

const (
	never allowance = iota
	afterStandstill
	always
)

// How requests may end. A machine that stands still has deadlines pass, or makes
// that they cannot be kept any more, and hosts seem to have died.
var (
	innocentEnds = map[string]allowance{
		endRight:                    always,
		status.ErrExpired.Name():    afterStandstill,
		status.ErrOverloaded.Name(): afterStandstill,
		status.ErrWorkerDied.Name(): afterStandstill,
	}
	poisonousEnds = map[string]allowance{
		status.ErrWorkerDied.Name(): always,
		status.ErrExpired.Name():    afterStandstill,
		status.ErrOverloaded.Name(): afterStandstill,
	}
)

// judge says whether nothing was lost, and how the throughput came back. What is
// lost, wrong or answered twice counts on any machine; what came too late counts
// only where the machine let processes run.
func (c *campaign) judge(o *options, poison int, reports []*report, idle *canary, struck, mended time.Time) error {
	late, excused, slowest := 0, 0, 0.0
	innocent, poisonous, why := map[string]int{}, map[string]int{}, map[string]string{}
	for _, r := range reports {
		late, excused, slowest = late+r.Late, excused+r.Excused, max(slowest, r.Slowest)
		for end, n := range r.Innocent {
			innocent[end] += n
		}
		for end, n := range r.Poisonous {
			poisonous[end] += n
		}
		maps.Copy(why, r.Why)
	}
	var wrongs, notJudged []string
	say := func(format string, args ...any) { wrongs = append(wrongs, fmt.Sprintf(format, args...)) }
	worst := idle.since(idle.begin)
	tooLate := 0
	count := func(what string, got map[string]int, may map[string]allowance) (all int) {
		for end, n := range got {
			all += n
			switch {
			case may[end] == always:
			case may[end] == afterStandstill && worst > stoodStill:
				tooLate += n
			default:
				say("%d %s requests: %s (%s)", n, what, end, why[end])
			}
		}
		return all
	}
	sent := o.requests / producerHosts * producerHosts
	deadly := 0
	if poison > 0 {
		deadly = sent / producerHosts / poison * producerHosts
	}
	if n := count("innocent", innocent, innocentEnds); n != sent-deadly {
		say("%d of %d innocent requests ended", n, sent-deadly)
	}
	if n := count("poisonous", poisonous, poisonousEnds); n != deadly {
		say("%d of %d poisonous requests ended", n, deadly)
	}
	if late > 0 {
		say("%d ended more than %v, and what the machine itself was late, after their deadline", late, graceful)
	}
	if tooLate > 0 {
		notJudged = append(notJudged, fmt.Sprintf("%d came too late, but the machine stood still", tooLate))
	}
	text := fmt.Sprintf("%-10s %d requests: %d right, %d wrong, %d late, %d poisoned, slowest %.2f s; a process that sleeps woke up to %d ms late", c.name, sent,
		innocent[endRight], innocent[endWrong], late+excused, poisonous[status.ErrWorkerDied.Name()], slowest, worst.Milliseconds())
	if share, known := c.throughput(reports, struck, mended); known {
		text += fmt.Sprintf("; from 2 s after the fault on %.0f %% of the healthy hosts' throughput", 100*share)
		if slow := idle.still(struck.Add(-reference), mended.Add(recovery+reference), busy); slow > mostlyBusy {
			notJudged = append(notJudged, fmt.Sprintf("throughput: the machine kept processes waiting for more than %v in %.0f %% of the time", busy, 100*slow))
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
	stoodStill = time.Second / 2       // a process that slept could not run for so long: half of what a relay waits for a host
	busy       = 20 * time.Millisecond // half of what a batch takes
	mostlyBusy = 0.2                   // of the tenths of seconds
)

// Windows of the throughput: while the fault lasts, from recovery on, against
// the reference before it and after its end.
const (
	recovery  = 2 * time.Second
	reference = 3 * time.Second
)

// throughput from two seconds after the fault to its end, as a share of what the
// healthy hosts do in the same run, before it and after it: the machine may have
// more to do at one time than at another.
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
					if k := int(t.UnixMilli()-r.Begin)/100 + j; k >= 0 && k < len(r.Answers) {
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

func canDelayHere() bool {
	name := fmt.Sprintf("rb%d-delay", os.Getpid())
	if ip("netns", "add", name) != nil {
		return false
	}
	defer ip("netns", "del", name)
	return canDelay(name)
}

var cables = map[*world]io.Writer{}

// plugCable links host 0 by a process.
func (w *world) plugCable() error {
	h, center := w.hosts[0], w.namespace("sw")
	cmd := exec.Command(w.self, "--role", "cable", "--ends", strings.Join([]string{center, "p0", h.name, "eth0"}, ","))
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	w.all = append(w.all, cmd)
	cables[w] = in
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return fmt.Errorf("cable: %w", err)
	}
	for _, args := range [][]string{
		{"-n", center, "link", "set", "p0", "master", "br0", "up"},
		{"-n", h.name, "addr", "add", h.address + "/24", "dev", "eth0"},
		{"-n", h.name, "link", "set", "eth0", "up"},
	} {
		if err := ip(args...); err != nil {
			return err
		}
	}
	return nil
}

// cable makes host 0's link bad or good: by netem, or by the process.
func (w *world) cable(quality string) error {
	if in := cables[w]; in != nil {
		_, err := fmt.Fprintln(in, quality)
		return err
	}
	delay, loss, _ := strings.Cut(quality, " ")
	args := []string{"netns", "exec", w.hosts[0].name, "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", delay, "loss", strings.TrimPrefix(loss, "0.0") + "%"}
	return ip(args...)
}
