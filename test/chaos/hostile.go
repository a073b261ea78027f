// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// hostilePeer runs a process that attaches again and again and breaks every rule,
// beside honest clients that should not notice.
func hostilePeer(r *run) {
	h := r.startHost(r.brokerJob(), 2, testbed.Spec{})
	h.load(loadJob{Load: 4, Pause: 2000})
	control := r.startControl(r.brokerJob(), 2, loadJob{Load: 4, Pause: 2000})
	least := 6 // seconds, so that every attack has its turn
	long := r.events >= 10_000_000
	if long {
		least = 120
	}
	p := r.start(testbed.Spec{Role: "hostile", Job: hostileJob{r.socket(), r.seed(), r.events, least}, Procs: 2})
	_ = unix.Setpriority(unix.PRIO_PROCESS, p.Pid(), 19) // it should break rules, not only take the CPU
	var mutations int
	c := h.compareWith(control, func() {
		for p.Wait(200*time.Millisecond) == testbed.ErrRunning {
			p.Latest("mutations", &mutations)
			r.progress(mutations)
		}
	})
	p.Latest("mutations", &mutations)
	r.progress(mutations)
	r.check(p.Wait(0) == nil, "the hostile process did not come to its end: %v", p.Expect("nothing", nil, 0))
	r.check(h.broker.Running(), "the broker died: %v", h.broker.State())
	out := h.log.count("client disconnected: it broke the protocol", "worker disconnected: it broke the protocol")
	fmt.Printf("   %d mutations; %d times disconnected with a reason in the log; honest p99 %v under attack, %v at a broker without\n",
		mutations, out, c.attacked.P99.Round(time.Microsecond), c.control.P99.Round(time.Microsecond))
	r.check(mutations >= r.events, "only %d mutations", mutations)
	r.check(out > 0, "the offender was never disconnected")
	c.notSlower(r, "lost wake-ups: honest p99", c.attacked.P99, c.control.P99, lostWake)
	if long {
		c.notSlower(r, "honest p99", c.attacked.P99, c.control.P99, time.Millisecond)
	} else {
		r.notJudged("whether honest requests got slower: the run is too short to tell an attack from a busy machine")
	}
	h.endLoads()
	h.settled()
	control.endLoads()
}

// lostWake is more than a busy machine adds to a p99, and less than a lost wake-up
// does.
const lostWake = 200 * time.Millisecond

// hostileJob describes a process that breaks every rule.
type hostileJob struct {
	Socket  string
	Seed    uint64
	Events  int
	Seconds int // at least
}

// playHostile attaches, breaks rules until the broker disconnects it, and starts again.
func playHostile(c *testbed.Child, job hostileJob) error {
	ctx := c.Context()
	rng := rand.New(rand.NewPCG(job.Seed, 4))
	mutations := 0
	end := time.Now().Add(time.Duration(job.Seconds) * time.Second)
	for shown := time.Now(); (mutations < job.Events || time.Now().Before(end)) && ctx.Err() == nil; {
		if time.Since(shown) > 200*time.Millisecond {
			shown = time.Now()
			_ = c.Tell("mutations", mutations)
		}
		if rng.IntN(200) == 0 {
			mutations += speakNonsense(job.Socket, rng)
			continue
		}
		req := &control.Request{Op: control.OpClient, Model: theModel.Name, Window: 1 + rng.IntN(8)}
		s, err := attach.Open(ctx, job.Socket, req)
		if err != nil {
			return fmt.Errorf("attach: %w", err)
		}
		gone := make(chan struct{})
		go func() { s.Gone(); close(gone) }()
		attack := attacks[rng.IntN(len(attacks))]
		for end := time.Now().Add(20 * time.Millisecond); time.Now().Before(end) && open(gone); {
			mutations += attack(s, rng)
			s.Doorbell.Ring()
		}
		s.HangUp()
		<-gone
		s.Close()
	}
	return c.Tell("mutations", mutations)
}

func open(c chan struct{}) bool {
	select {
	case <-c:
		return false
	default:
		return true
	}
}
