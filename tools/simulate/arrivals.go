// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// Arrivals is the process by which requests come: Poisson, Bursty or ClosedLoop.
type Arrivals interface {
	fmt.Stringer
	validate() error
	// clients is how many clients attach before the first request.
	clients() int
	// begin schedules the first commits.
	begin(w *world)
	// committed may schedule the next request after a commit.
	committed(w *world)
	// answered may schedule the next request of a client that was answered.
	answered(w *world, client batcher.ClientID, at batcher.Time)
}

// openLoop are arrivals that do not depend on the answers.
type openLoop struct{}

func (openLoop) answered(*world, batcher.ClientID, batcher.Time) {}

// Poisson arrivals are independent of each other and of the answers, as of very many users.
type Poisson struct {
	Rate    float64 // requests per second
	Clients int     // clients that send them in turn; 0 means 64
	openLoop
}

// Bursty arrivals are Poisson while on and none while off. Both phases have exponential lengths.
type Bursty struct {
	Rate    float64       // requests per second while on
	On, Off time.Duration // mean lengths
	Clients int           // as in Poisson
	openLoop
}

// ClosedLoop is a number of clients. Each keeps up to InFlight requests in flight and thinks before the next.
type ClosedLoop struct {
	Clients  int
	InFlight int           // per client; 0 means 1
	Think    time.Duration // mean, exponential; 0 = at once
}

const (
	defaultClients = 64
	refusalPause   = batcher.Time(time.Millisecond) // of a client after a refusal, in a closed loop
	minPerBurst    = 0.001
)

func or(n, standard int) int {
	if n == 0 {
		return standard
	}
	return n
}

func checkRate(rate float64, clients int) error {
	return cmp.Or(
		need(rate > 0 && rate <= 1e9, "rate is %v requests per second, must be more than 0 and at most 1e9", rate),
		checkClients(clients),
	)
}

func checkClients(n int) error {
	return need(n >= 0 && n <= 1_000_000, "clients is %d, must be 1..1000000", n)
}

// exponential is a random time with the given mean in nanoseconds, within endOfTime.
func exponential(rng *rand.Rand, mean float64) batcher.Time {
	const most = float64(endOfTime)
	return batcher.Time(min(rng.ExpFloat64()*min(mean, most), most))
}

func (p Poisson) String() string {
	return fmt.Sprintf("Poisson arrivals, %g requests/s through %d clients", p.Rate, p.clients())
}
func (p Poisson) validate() error { return checkRate(p.Rate, p.Clients) }
func (p Poisson) clients() int    { return or(p.Clients, defaultClients) }
func (p Poisson) begin(w *world)  { p.committed(w) }

func (p Poisson) committed(w *world) {
	rate := p.Rate * w.rateNow()
	w.commitAt(w.commitTime+exponential(w.rng, 1e9/rate), w.nextInTurn(p.clients()))
}

func (p Bursty) String() string {
	return fmt.Sprintf("bursty arrivals, %g requests/s for %v, then none for %v (means), through %d clients",
		p.Rate, p.On, p.Off, p.clients())
}

func (p Bursty) validate() error {
	each := p.Rate * p.On.Seconds() // every burst is drawn, even an empty one
	return cmp.Or(
		need(p.On > 0 && p.Off >= 0, "on is %v and off is %v, must be positive", p.On, p.Off),
		need(max(p.On, p.Off) <= policy.MaxDuration, "on is %v and off is %v, must be at most %v", p.On, p.Off, policy.MaxDuration),
		checkRate(p.Rate, p.Clients),
		need(each >= minPerBurst, "a burst of %v has %g requests on average, must be at least %g", p.On, each, minPerBurst),
	)
}

func (p Bursty) clients() int { return or(p.Clients, defaultClients) }

func (p Bursty) begin(w *world) {
	w.burstEnd = exponential(w.rng, float64(p.On))
	p.committed(w)
}

func (p Bursty) committed(w *world) {
	rate := p.Rate * w.rateNow()
	at := w.commitTime + exponential(w.rng, 1e9/rate)
	for at > w.burstEnd && at <= endOfTime {
		// The process has no memory: the gap starts again with the next burst.
		next := w.burstEnd + exponential(w.rng, float64(p.Off))
		w.burstEnd = next + exponential(w.rng, float64(p.On))
		at = next + exponential(w.rng, 1e9/rate)
	}
	w.commitAt(at, w.nextInTurn(p.clients()))
}

func (p ClosedLoop) String() string {
	return fmt.Sprintf("closed loop, %d clients with %d in flight, think time %v", p.Clients, or(p.InFlight, 1), p.Think)
}

func (p ClosedLoop) validate() error {
	return cmp.Or(
		need(p.Clients != 0, "clients is 0, must be 1..1000000"),
		checkClients(p.Clients),
		need(p.InFlight >= 0 && p.InFlight <= 100_000, "in flight per client is %d, must be 1..100000", p.InFlight),
		need(p.Think >= 0 && p.Think <= policy.MaxDuration, "think time is %v, must be 0..%v", p.Think, policy.MaxDuration),
	)
}

func (p ClosedLoop) clients() int { return p.Clients }

func (p ClosedLoop) begin(w *world) {
	for range or(p.InFlight, 1) {
		for c := range p.Clients {
			w.commitAt(exponential(w.rng, float64(p.Think)), batcher.ClientID(c))
		}
	}
}

func (p ClosedLoop) committed(*world) {}

func (p ClosedLoop) answered(w *world, c batcher.ClientID, at batcher.Time) {
	w.commitAt(at+exponential(w.rng, float64(p.Think)), c)
}
