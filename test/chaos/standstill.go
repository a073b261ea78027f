// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"fmt"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// standstill stops the broker for longer than requests may take: those of
// every kind of client still end by their own deadlines, and everything goes on
// afterwards.
func standstill(r *run) {
	h := r.startHost(r.brokerJob(), 2, testbed.Spec{})
	const timeout = 200 * time.Millisecond
	h.loadEveryKind(3, 2*time.Millisecond, timeout)
	for i := range r.events {
		time.Sleep(time.Duration(50+r.intn(150)) * time.Millisecond)
		h.broker.Signal(syscall.SIGSTOP)
		time.Sleep(timeout + time.Duration(r.intn(700))*time.Millisecond)
		h.broker.Signal(syscall.SIGCONT)
		r.progress(i + 1)
	}
	sum := h.endLoads("Expired", "Overloaded", "Timeout", "Full", "QueueTimeout")
	fmt.Printf("   deadlines of %v; the slowest request took %v\n", timeout, sum.Slowest.Round(time.Millisecond))
	r.check(sum.Named["Expired"]+sum.Named["Overloaded"]+sum.Named["Timeout"]+sum.Named["Full"] > 0, "no deadline passed while the broker stood still")
	h.settled()
}
