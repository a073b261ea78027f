// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker/engine"
)

// outside is the broker as its loops see it.
type outside struct{ b *Broker }

var _ engine.Outside = outside{}

func (o outside) Offended(p engine.Process) { o.b.offenders.add(p) }

func (o outside) WorkerCame(pid int, kin []int, first bool) (spare bool) {
	o.b.super.Attached(pid, kin)
	if first {
		o.b.noteStaff()
	}
	return o.b.super.AssignRole(pid)
}

func (o outside) WorkerLeft(pid int, withBatch, last bool) (replace bool) {
	if last {
		o.b.noteStaff()
	}
	return o.b.super.Left(pid, withBatch)
}

// noteStaff notes that a model has got its first worker or lost its last.
func (b *Broker) noteStaff() {
	b.models.changes.noteChange()
	b.staff.wantLook()
	go b.models.moveAllFollowers() // not on the loop: it may move many clients
}

func (o outside) WorkerFailed(pid int) (replaced bool) { return o.b.super.Replace(pid) }

func (o outside) Promoted(spare, lost int) { o.b.super.Promoted(spare, lost) }

// Kill ends a worker's process. Under MPS it ends the worker's kernels first: a worker
// that is killed while its kernel runs breaks the contexts of the other workers. That may
// take seconds, so the loop does not wait for it.
func (o outside) Kill(p *engine.Peer, left bool) error {
	if !left {
		o.b.super.Killed(p.Pid)
	}
	if !o.b.super.UsesMPS(p.Pid) {
		return p.Kill()
	}
	if err := p.Signal(0); err != nil {
		return err
	}
	fd := p.DupPidfd()
	if fd < 0 {
		return p.Kill()
	}
	go func() {
		defer engine.CloseFD(fd)
		o.b.super.TerminateClient(p.Pid)
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}()
	return nil
}

// dropDevices gives the device memory of rings and weights back after it was lost. It disconnects the
// clients. They attach again once the next worker has allocated new memory.
func (b *Broker) dropDevices() {
	b.weights.dropDevices(b)
	for _, l := range b.loops {
		l.LoseDevices()
	}
}
