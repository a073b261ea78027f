// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
)

func TestReadyChecksThatAWorkerAnswers(t *testing.T) {
	c := startCLI(t)
	expect := func(code int, says string, args ...string) {
		t.Helper()
		if out, got := c.run(args...); got != code || !strings.Contains(out, says) {
			t.Errorf("ringbatch %s: status %d, want %d and %q:\n%s", strings.Join(args, " "), got, code, says, out)
		}
	}
	// saysInTime is for commands that give up after a while with a reason. On a slow machine
	// a command may end before it knows the reason, so the while grows. The last argument
	// is its flag.
	saysInTime := func(says string, args ...string) {
		t.Helper()
		while := 50 * time.Millisecond
		c.until(strings.Join(args, " ")+" says "+says, func() bool {
			out, code := c.run(append(args, while.String())...)
			while = min(2*while, time.Second) // the broker may be late, too
			if code != 1 || !strings.Contains(out, says) && !strings.Contains(out, "deadline") {
				t.Fatalf("ringbatch %s: status %d\n%s", strings.Join(args, " "), code, out)
			}
			return strings.Contains(out, says)
		})
	}
	expect(0, "live", "ready", "--live")
	expect(1, `"affine" is not ready: no worker attached`, "ready")
	saysInTime("not ready: no worker attached", "ready", "affine", "--wait")
	expect(1, "no such model", "ready", "nobody")
	expect(2, "--live is about the broker", "ready", "affine", "--live")
	expect(1, "no broker", "ready", "--socket", c.bed.Path("nobody.sock"))

	// With a deadline a request waits for a worker until then; or it is refused.
	saysInTime("deadline passed: no worker attached", "infer", "affine", "1", "2", "3", "4", "--timeout")
	expect(0, "no_worker: wait -> refuse", "set", "affine", "no_worker=refuse")
	expect(1, "no worker attached: nobody runs this model", "infer", "affine", "1", "2", "3", "4")

	w := c.start("worker", "affine", "--scale", "2", "--input", "x:f32[4]")
	expect(0, "ready", "ready", "affine", "--wait", "2m")
	expect(0, "2 4 6 8", "infer", "affine", "1", "2", "3", "4")
	w.Signal(syscall.SIGSTOP)
	c.until("a stopped worker makes it not ready", func() bool {
		out, code := c.run("ready")
		return code == 1 && strings.Contains(out, "is stopped")
	})
	w.Signal(syscall.SIGCONT)
	c.until("it is ready again", func() bool { _, code := c.run("ready"); return code == 0 })
	w.Signal(syscall.SIGKILL)
	_ = w.Wait(patience)
	c.until("a dead worker makes it not ready", func() bool { _, code := c.run("ready"); return code == 1 })
}

func TestAGoalBelowTheTimeOfABatchIsTooShort(t *testing.T) {
	m := &stats.Model{LatencyGoalMS: 4}
	if s := goalTooShort(m); s != "" {
		t.Errorf("before a batch was seen: %s", s)
	}
	m.Learned.Costs = []stats.LearnedCost{{Rows: 1, MS: 5}, {Rows: 8, MS: 9}}
	if s := goalTooShort(m); !strings.Contains(s, "4ms") || !strings.Contains(s, "5ms") {
		t.Errorf("%q", s)
	}
	m.Learned.Costs = []stats.LearnedCost{{Rows: 1, MS: 5, Batches: 100}, {Rows: 7, MS: 1, Batches: 2}, {Rows: 8, MS: 9, Batches: 50}}
	if s := goalTooShort(m); !strings.Contains(s, "5ms") {
		t.Errorf("a size that was hardly seen counted: %q", s)
	}
	m.LatencyGoalMS = 6
	if s := goalTooShort(m); s != "" {
		t.Errorf("a goal that one batch keeps: %s", s)
	}
}
