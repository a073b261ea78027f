// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
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
	{name: "kill", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].end(syscall.SIGKILL); return nil }, lasts: 5 * time.Second},
	{name: "stop", short: true, healthy: 2, fault: func(w *world) error { w.hosts[0].signal(syscall.SIGSTOP); return nil },
		mend: func(w *world) error { w.hosts[0].signal(syscall.SIGCONT); return nil }, lasts: 5 * time.Second},
	{name: "partition", healthy: 2, fault: func(w *world) error { return w.hosts[0].link(false) },
		mend: func(w *world) error { return w.hosts[0].link(true) }, lasts: 5 * time.Second},
	{name: "bad_link", healthy: 2, cable: true, fault: func(w *world) error { return w.cable("50ms 0.01") },
		mend: func(w *world) error { return w.cable("0s 0") }, lasts: 5 * time.Second},
	{name: "rolling", healthy: 2, fault: rollingUpgrade},
	{name: "flapping", healthy: 2, fault: flap},
	{name: "slow", healthy: 2.1, fault: func(w *world) error { w.hosts[0].processes["worker"].Process.Signal(syscall.SIGUSR1); return nil },
		mend: func(w *world) error { return w.hosts[0].processes["worker"].Process.Signal(syscall.SIGUSR2) }, lasts: 5 * time.Second},
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
		poison = 5000
	}
	deadline := "5s"
	if o.short { // CI's machine may have other things to do
		deadline = "20s"
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
	before := 3 * time.Second
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
	return c.judge(o, poison, reports, struck, mended)
}

// keepWorker starts the worker again when it dies of an input, as a broker's
// supervisor would.
func (h *host) keepWorker() {
	for h.w.ctx.Err() == nil {
		c := h.processes["worker"]
		if c == nil || c.Process == nil {
			return
		}
		state, err := c.Process.Wait()
		if err != nil || state.ExitCode() != 66 {
			return
		}
		args := h.args["worker"]
		if _, err := h.start("worker", args[0], args[1:]...); err != nil {
			return
		}
	}
}

// judge says whether nothing was lost, and how the throughput came back.
func (c *campaign) judge(o *options, poison int, reports []*report, struck, mended time.Time) error {
	ok, ended, wrong, late, poisoned := 0, 0, 0, 0, 0
	slowest := 0.0
	failed := map[string]int{}
	for _, r := range reports {
		ok, wrong, late, poisoned, slowest = ok+r.OK, wrong+r.Wrong, late+r.Late, poisoned+r.Poisoned, max(slowest, r.Slowest)
		ended += r.OK + r.Wrong + r.Poisoned
		for name, n := range r.Failed {
			failed[name] += n
			ended += n
		}
	}
	sent := o.requests / producerHosts * producerHosts
	var wrongs []string
	say := func(format string, args ...any) { wrongs = append(wrongs, fmt.Sprintf(format, args...)) }
	if ended != sent {
		say("%d of %d requests ended", ended, sent)
	}
	if wrong > 0 {
		say("%d wrong answers", wrong)
	}
	if late > 0 {
		say("%d ended more than %v after their deadline", late, graceful)
	}
	if len(failed) > 0 {
		say("failed: %v", failed)
	}
	if poison > 0 && poisoned != sent/producerHosts/poison*producerHosts {
		say("%d poisonous inputs failed, want %d", poisoned, sent/producerHosts/poison*producerHosts)
	}
	text := fmt.Sprintf("%-10s %d requests: %d right, %d wrong, %d late, %d poisoned, slowest %.2f s", c.name, sent, ok, wrong, late, poisoned, slowest)
	if share, known := c.throughput(reports, struck, mended); known {
		text += fmt.Sprintf("; from 2 s after the fault on %.0f %% of the healthy hosts' throughput", 100*share)
		if !o.short && share < 0.95 {
			say("throughput %.0f %% of that of the healthy hosts, want 95", 100*share)
		}
	}
	fmt.Println(text)
	if len(wrongs) > 0 {
		return errors.New(strings.Join(wrongs, "; "))
	}
	return nil
}

// throughput from two seconds after the fault to its end, as a share of what the
// healthy hosts did before it. Median tenths of seconds: this machine has other
// things to do.
func (c *campaign) throughput(reports []*report, struck, mended time.Time) (float64, bool) {
	if struck.IsZero() || mended.Sub(struck) < 3*time.Second {
		return 0, false
	}
	between := func(from, to time.Time) float64 {
		var sums []int
		for t := from; t.Before(to); t = t.Add(100 * time.Millisecond) {
			sum := 0
			for _, r := range reports {
				if k := int(t.UnixMilli()-r.Begin) / 100; k >= 0 && k < len(r.Answers) {
					sum += r.Answers[k]
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
	was := between(struck.Add(-1500*time.Millisecond), struck)
	is := between(struck.Add(2*time.Second), mended)
	if was == 0 || is == 0 {
		return 0, false
	}
	return is / (was * c.healthy / gpuHosts), true
}

func canDelayHere() bool {
	name := "rbdelay"
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
