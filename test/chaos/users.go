// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Users of the campaigns; on no list unless a campaign grants them something.
const (
	stranger = 54321
	refused  = stranger + 1
	owner    = stranger + 2 // of a broker that does not run as root
)

// foreignDeaths kills workers of another user, which the broker could not kill
// itself: at any step, and after they have hung up. Their batches run again, and no
// request ends with WorkerHung.
func foreignDeaths(r *run) {
	job := r.brokerJob()
	r.openTo(&job, broker.Grant{UIDs: []int{stranger}, May: broker.MayServe},
		broker.Grant{UIDs: []int{0}, May: broker.MayInfer | broker.MayAdminister})
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

// openTo lets other users in.
func (r *run) openTo(job *testbed.BrokerJob, grants ...broker.Grant) {
	dir := r.bed.Path("open")
	r.must(errors.Join(os.Chmod(r.bed.Dir, 0o755), os.MkdirAll(dir, 0o755), os.Chmod(dir, 0o755)))
	job.OpenFolder, job.Grants = true, grants
}

// ping attaches as a user.
func (r *run) ping(socket string, uid int) error {
	p := r.start(testbed.Spec{Role: "ping", Job: socket, UID: uid})
	defer r.bed.End(p)
	return p.Expect("attached", nil, enoughTime)
}

// hangUpAndDie closes this process's connection and dies a moment later: the broker
// sees the end of the socket before the death.
func (p *player) hangUpAndDie() {
	hangUpSockets()
	time.Sleep(time.Duration(p.rng.IntN(200)) * time.Millisecond)
	p.die()
}

// hangUpSockets ends the connections of this process.
func hangUpSockets() {
	for fd := 3; fd < 64; fd++ {
		if kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && kind == unix.AF_UNIX {
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
	}
}
