// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// signalStorm interrupts every system call of everybody, all the time.
func signalStorm(r *run) {
	h := r.startHost(r.brokerJob(), 2, testbed.Spec{})
	h.load(loadJob{Load: 4, Pause: 500})
	all := append([]*testbed.Process{h.broker, h.loads[0]}, h.workers...)
	storm := []syscall.Signal{unix.SIGURG, unix.SIGPROF, unix.SIGUSR1, unix.SIGCHLD}
	for sent := 0; sent < r.events && r.ctx.Err() == nil; {
		for _, p := range all {
			p.Signal(storm[r.intn(len(storm))])
			sent++
		}
		time.Sleep(300 * time.Microsecond)
		r.progress(sent)
	}
	for _, p := range all {
		r.check(p.Running(), "%s died of signals: %v\n%s", p, p.State(), p.Log())
	}
	fmt.Printf("   %.1f signals per millisecond\n", float64(r.events)/float64(time.Since(r.born).Milliseconds()))
	h.endLoads()
	h.settled()
}

func limits(r *run) {
	fewDescriptors(r)
	r.progress(1)
	defer r.progress(2)
	fullDisk(r)
}

// fewDescriptors lets the broker run out of them: those that come then are
// refused with a name, those that were there notice nothing.
func fewDescriptors(r *run) {
	h := r.startHost(r.brokerJob(), 1, testbed.Spec{Limits: testbed.Limits{Descriptors: 60}})
	defer h.end()
	h.load(loadJob{Load: 2, Pause: 1000})
	var clients []*client.Client
	var refused error
	for refused == nil && len(clients) < 100 {
		ctx, cancel := context.WithTimeout(r.ctx, enoughTime)
		c, err := client.Dial(ctx, theModel.Name, client.WithSocket(r.socket()), client.WithWindow(1))
		cancel()
		if err == nil {
			clients = append(clients, c)
		}
		refused = err
	}
	fmt.Printf("   no descriptors: %d clients attached, then: %v\n", len(clients), refused)
	r.check(errors.Is(refused, status.ErrNoDescriptors), "out of descriptors, but a client was told: %v", refused)
	for _, c := range clients {
		_ = c.Close()
	}
	err := testbed.Eventually(enoughTime, func() error { // until the broker has seen them leave
		c, err := client.Dial(r.ctx, theModel.Name, client.WithSocket(r.socket()))
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	r.check(err == nil, "there are descriptors again, but: %v", err)
	h.endLoads()
	h.settled()
}

// fullDisk has the broker log to a device that is always full.
func fullDisk(r *run) {
	job := r.brokerJob()
	job.Log = "/dev/full"
	h := r.startHost(job, 1, testbed.Spec{})
	h.load(loadJob{Load: 2, Pause: 1000})
	time.Sleep(500 * time.Millisecond)
	h.endLoads()
	h.settled()
}
