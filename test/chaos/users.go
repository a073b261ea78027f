// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// permissions gives real users every set of permissions and lets each try
// everything: what it was not given ends with Forbidden, and nobody can set a
// lease at which workers are killed.
func permissions(r *run) {
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
		r.must(r.openTo(&job, grants...))
		h := r.startHost(job, 1, testbed.Spec{})
		p := r.start(testbed.Spec{Role: "try", Job: job.Socket, UID: stranger})
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
}

// owner is the user that the broker runs as, where it is not this one.
const owner = stranger + 2

// foreignDeaths kills workers of another user than the broker's, which it
// could not kill itself: at any step, and after they have hung up. Their
// batches are run again; nobody is told that a worker hangs.
func foreignDeaths(r *run) {
	job := r.brokerJob()
	r.must(r.openTo(&job, broker.Grant{UIDs: []int{stranger}, May: broker.MayServe}, broker.Grant{UIDs: []int{0}, May: broker.MayInfer | broker.MayAdminister}))
	job.Socket = r.bed.Path("open/broker.sock")
	r.must(os.Chown(r.bed.Path("open"), owner, owner))
	h := r.startHost(job, 0, testbed.Spec{UID: owner})
	w := r.victim("worker", victimJob{Socket: job.Socket, UID: stranger})
	r.must(w.Expect("attached", nil, enoughTime))
	h.load(loadJob{Socket: job.Socket, Load: 8, Pause: 1000})
	labels := append([]string{"hangs up", "hangs up", "hangs up"}, workerLabels...)
	const requeue = "requeue of a dead worker of another user"
	r.parallel(r.events, width, func() {
		label := labels[r.intn(len(labels))]
		h.workerDies(requeue, victimJob{Socket: job.Socket, UID: stranger, Label: label, After: r.intn(4)})
	})
	sum := h.endLoads("WorkerDied")
	fmt.Printf("   %d requests met three dying workers\n", sum.Named["WorkerDied"])
	h.settled()
	r.inTime(requeue, reclaimBound)
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
