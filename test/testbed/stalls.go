// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Stalls records when this machine did not run a process that was ready to run. Rigs do
// not judge times of these moments.
type Stalls struct {
	mu  sync.Mutex
	all []stall // in the order of their ends
}

type stall struct{ from, to time.Time }

const (
	stallNap  = 5 * time.Millisecond
	stallMost = 15 * time.Millisecond // a nap that takes longer is a stall
)

// WatchStalls sleeps in short naps until over is closed and records naps that took too
// long. With cpus it also naps on each CPU: a hypervisor may take one away.
func WatchStalls(over <-chan struct{}, cpus bool) *Stalls {
	s := &Stalls{}
	go s.watch(over, func() { time.Sleep(stallNap) })
	var all unix.CPUSet
	if cpus && unix.SchedGetaffinity(0, &all) == nil {
		for cpu := range 64 * len(all) {
			if all.IsSet(cpu) {
				go s.watchCPU(cpu, over)
			}
		}
	}
	return s
}

func (s *Stalls) watchCPU(cpu int, over <-chan struct{}) {
	runtime.LockOSThread() // the thread ends with this goroutine
	var only unix.CPUSet
	only.Set(cpu)
	if unix.SchedSetaffinity(0, &only) != nil {
		return
	}
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), -20) // if allowed: other processes are no stall
	nap := unix.NsecToTimespec(int64(stallNap))
	s.watch(over, func() { _ = unix.Nanosleep(&nap, nil) })
}

func (s *Stalls) watch(over <-chan struct{}, nap func()) {
	for {
		from := time.Now()
		nap()
		select {
		case <-over:
			return
		default:
		}
		if time.Since(from) > stallMost {
			s.mu.Lock()
			s.all = append(s.all, stall{from, time.Now()})
			s.mu.Unlock()
		}
	}
}

// Longest is the longest stall that touches the time between from and to.
func (s *Stalls) Longest(from, to time.Time) (longest time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.all) - 1; i >= 0 && s.all[i].to.After(from); i-- {
		if s.all[i].from.Before(to) {
			longest = max(longest, s.all[i].to.Sub(s.all[i].from))
		}
	}
	return longest
}

// Since is the sum of all stalls that ended after from.
func (s *Stalls) Since(from time.Time) (sum time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.all) - 1; i >= 0 && s.all[i].to.After(from); i-- {
		sum += s.all[i].to.Sub(s.all[i].from)
	}
	return sum
}
