// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// permissions gives real users every set of permissions and lets each try
// everything: what it was not given ends with Forbidden, and nobody can set a
// lease at which workers are killed.
func permissions(r *run) error {
	if os.Getuid() != 0 {
		r.notJudged("only root can become another user")
		return nil
	}
	const all = broker.MayInfer | broker.MayServe | broker.MayAdminister
	for i := range r.events {
		may := broker.Permissions(i % (int(all) + 1))
		var grants []broker.Grant
		job := r.brokerJob()
		for _, one := range []broker.Permissions{broker.MayInfer, broker.MayServe, broker.MayAdminister} {
			if may&one == 0 {
				continue
			}
			g := broker.Grant{UIDs: []int{stranger}, May: one}
			if r.intn(2) == 0 { // by group
				g = broker.Grant{GIDs: []int{stranger}, May: one}
			}
			grants = append(grants, g)
		}
		if may == broker.MayInfer && r.intn(2) == 0 { // the short form
			job.AllowedUIDs, grants = []int{stranger}, nil
		}
		if err := r.openTo(&job, grants...); err != nil {
			return err
		}
		h, err := r.startHost(job, 1, testbed.Limits{})
		if err != nil {
			return err
		}
		p, err := r.bed.Start(testbed.Spec{Role: "try", Job: job.Socket, UID: stranger})
		if err != nil {
			return err
		}
		got := map[string]string{}
		if err := p.Expect("tried", &got, enoughTime); err != nil {
			r.fail("may %v: %v", may, err)
		}
		for _, c := range []struct {
			what string
			ok   bool
			as   string // if allowed
		}{
			{"ping", may != 0, "ok"}, {"infer", may&broker.MayInfer != 0, "ok"}, {"serve", may&broker.MayServe != 0, "ok"},
			{"declare", may&broker.MayServe != 0, "Invalid"}, // its name has blanks: it got that far
			{"set", may&broker.MayAdminister != 0, "ok"}, {"no lease", may&broker.MayAdminister != 0, "Invalid"},
		} {
			want := "Forbidden"
			if c.ok {
				want = c.as
			}
			r.check(got[c.what] == want, "a user who may %v: %s ended with %q, not %q", may, c.what, got[c.what], want)
		}
		r.check(h.workers[0].Running(), "a user who may %v: the worker died", may)
		r.bed.End(p)
		h.end()
		r.progress(i + 1)
	}
	return nil
}

// owner is the user that the broker runs as, where it is not this one.
const owner = stranger + 2

// foreignDeaths kills workers of another user than the broker's, which it
// could not kill itself: at any step, and after they have hung up. Their
// batches are run again; nobody is told that a worker hangs.
func foreignDeaths(r *run) error {
	if os.Getuid() != 0 {
		r.notJudged("only root can become another user")
		return nil
	}
	job := r.brokerJob()
	if err := r.openTo(&job, broker.Grant{UIDs: []int{stranger}, May: broker.MayServe}, broker.Grant{UIDs: []int{0}, May: broker.MayInfer | broker.MayAdminister}); err != nil {
		return err
	}
	job.Socket = r.bed.Path("open/broker.sock")
	if err := os.Chown(r.bed.Path("open"), owner, owner); err != nil {
		return err
	}
	h, err := r.hostOf(job, owner)
	if err != nil {
		return err
	}
	w, err := r.bed.Start(testbed.Spec{Role: "worker", Job: victimJob{Socket: job.Socket, Model: theModel}, UID: stranger, Procs: 2})
	if err != nil {
		return err
	}
	if err := w.Expect("attached", nil, enoughTime); err != nil {
		return err
	}
	if err := h.load(loadJob{Socket: job.Socket, Load: 8, Pause: 1000}); err != nil {
		return err
	}
	labels := append([]string{"hangs up", "hangs up", "hangs up"}, workerLabels...)
	const requeue = "requeue of a dead worker of another user"
	r.parallel(r.events, r.width, func() {
		label := labels[r.intn(len(labels))]
		p, err := r.bed.Start(testbed.Spec{Role: "worker", UID: stranger, Procs: 2,
			Job: victimJob{Socket: job.Socket, Model: theModel, Label: label, After: r.intn(4), Seed: r.seed()}})
		if err != nil {
			r.fail("%v", err)
			return
		}
		defer r.bed.End(p)
		var nanos int64
		if p.Wait(enoughTime) == testbed.ErrRunning || !p.Latest("dying", &nanos) {
			r.fail("a worker of another user that should die at %q did not\n%s", label, p.Log())
			return
		}
		at, ok := h.log.wait("worker left", p.Pid(), enoughTime)
		r.check(ok, "the broker did not notice the death of another user's worker at %q", label)
		if ok && label != "hangs up" { // one that hung up leaves when that is seen
			r.span(requeue, time.Unix(0, nanos), at)
		}
	})
	sum := h.endLoads("WorkerDied")
	fmt.Printf("   %d requests met three dying workers\n", sum.Named["WorkerDied"])
	h.settled()
	r.inTime(requeue, reclaimBound)
	return nil
}

// hostOf starts a broker as another user.
func (r *run) hostOf(job testbed.BrokerJob, uid int) (*host, error) {
	h := &host{r: r, log: newJournal()}
	h.spec = testbed.Spec{Role: "broker", Job: job, OnLog: h.log.read, Procs: 2, UID: uid}
	if err := h.startBroker(); err != nil {
		return nil, err
	}
	var err error
	h.before, err = testbed.UsageOf(h.broker.Pid())
	return h, err
}

// hangUpAndDie ends this process's connection to the broker, and the process a
// moment later: the end of the socket is seen before the death.
func (p *player) hangUpAndDie() {
	for fd := 3; fd < 64; fd++ {
		if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && kind == unix.AF_UNIX {
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
	}
	time.Sleep(time.Duration(p.rng.IntN(200)) * time.Millisecond)
	p.die()
}
