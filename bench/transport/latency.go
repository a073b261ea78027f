// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// startFutexes starts the two processes of the futex round trip.
func startFutexes(r *rig.Rig) (pair []*testbed.Process) {
	page, err := sharedPage()
	r.Must(err)
	defer page.Close() // they have it
	for _, role := range []string{"futex pong", "futex ping"} {
		pair = append(pair, r.MustStart(testbed.Spec{Role: role, Files: []*os.File{page}}))
	}
	return pair
}

// measureLatency has one client, one worker, 64 bytes, one request at a time, against the futex round trip between two parked
// processes, by raw calls.
func measureLatency(r *rig.Rig) {
	const requests = 4000 // per round
	futexes := startFutexes(r)
	job := small64("echo64", 32, 64)
	job.WaitTime = time.Millisecond
	e := startEcho(r, 1, job)
	producers := startProducers(r, 1, producerJob{Socket: e.socket, Model: "echo64", Window: 8})
	var ratios, medians, p99s, futex []float64
	round := func(counts bool) {
		rs := together(r, producers, order{Do: "latency", Count: requests}, 0)
		trip := float64(rig.OrderAll[int64](r, futexes, requests)[1]) / 1e3
		if counts {
			request := float64(rs[0].Nanos) / 1e3
			medians, p99s, ratios = append(medians, request), append(p99s, float64(rs[0].P99)/1e3), append(ratios, request/trip)
			futex = append(futex, trip)
		}
	}
	for range 2 { // rounds are short
		r.InTurns("latency", round)
	}
	r.Check("latency_ratio", rig.Median(ratios), "<=", 2.5, "request %.1f µs (p99 %.1f) / futex round trip %.1f µs; median of %d rounds",
		rig.Median(medians), rig.Median(p99s), rig.Median(futex), len(ratios))
}

// sharedPage is a page of memory for two processes.
func sharedPage() (*os.File, error) {
	fd, err := unix.MemfdCreate("ringbatch-bench-futex", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "futex page")
	if err := f.Truncate(4096); err != nil {
		f.Close()
		return nil, fmt.Errorf("memfd: %w", err)
	}
	return f, nil
}
