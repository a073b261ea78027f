// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/simulate"
	"github.com/ringbatch/ringbatch/internal/profile"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/worker"
)

// What a prediction takes.
const (
	simulatedRequests = 4000
	hop               = 15 * time.Microsecond
	margin            = 0.9 // of the goal: what is simulated has no bad days
)

// clientsOf spreads requests in flight over connections.
func clientsOf(inFlight int) (clients, each int) {
	clients = min(inFlight, 32)
	return clients, (inFlight + clients - 1) / clients
}

// mostInFlight is how many full batches of requests a closed loop has in flight for each
// instance: one that runs, and the next.
const mostInFlight = 2

// openClients are those of an open loop.
const openClients = 16

// predict simulates every setting.
func (r *Report) predict(ctx context.Context, p *profile.Profile, mps bool, most int) ([]*Candidate, error) {
	alone, busy, err := p.Costs()
	if err != nil {
		return nil, err
	}
	var list []*Candidate
	for _, n := range profile.Ascending(r.options.Instances) {
		if n > most {
			continue
		}
		for _, size := range r.sizes() {
			if p.Fails(size, n) {
				continue
			}
			c := &Candidate{Setting: Setting{n, size, mps}, full: alone.Of(size)}
			workers := n * max(1, r.workersEach)
			if others := min(workers-1, len(busy)); others > 0 {
				c.full = busy[others-1].Of(size)
			}
			if err := r.predictOne(ctx, c, simulate.Config{
				Policy:  policy.Settings{MaxBatchSize: size, WaitTime: policy.Auto},
				Workers: simulate.Workers{Count: workers, Depth: worker.DefaultDepth},
				Cost:    alone, Busy: busy, Hop: hop, Requests: simulatedRequests, Seed: 1,
			}); err != nil {
				return nil, err
			}
			list = append(list, c)
		}
	}
	return list, nil
}

// predictOne simulates the load that the setting is to be measured with: that of
// the rate, or a closed loop with as many requests in flight as do most within
// the goal.
func (r *Report) predictOne(ctx context.Context, c *Candidate, cfg simulate.Config) error {
	if r.Goal.Rate > 0 {
		cfg.Arrivals = simulate.Poisson{Rate: r.Goal.Rate, Clients: openClients}
		f, err := simulated(ctx, cfg)
		if err != nil {
			return err
		}
		f.least = served * r.Goal.Rate
		c.ways = []way{{0, f}}
		c.take(r, margin)
		return nil
	}
	full := float64(cfg.Workers.Count * c.MaxBatchSize)
	shares := []float64{mostInFlight}
	if r.Goal.P99 > 0 {
		shares = []float64{0.25, 0.5, 0.75, 1, 1.25, 1.5, mostInFlight}
	}
	for _, share := range shares {
		inFlight := max(1, int(math.Round(share*full)))
		clients, each := clientsOf(inFlight)
		cfg.Arrivals = simulate.ClosedLoop{Clients: clients, InFlight: each}
		f, err := simulated(ctx, cfg)
		if err != nil {
			return err
		}
		c.ways = append(c.ways, way{inFlight, f})
	}
	c.take(r, margin)
	return nil
}

// way is a load that a setting may be measured with, and what is simulated for it.
type way struct {
	inFlight int // of a closed loop
	figures  *Figures
}

// take chooses the load that does most with p99 within a share of the goal. What was
// measured with another one is forgotten. Instances that do not come up do so with none.
func (c *Candidate) take(r *Report, share float64) {
	if c.absent {
		return
	}
	best := c.ways[0]
	for _, w := range c.ways[1:] {
		if r.better(w.figures, best.figures, share) {
			best = w
		}
	}
	if c.InFlight != best.inFlight {
		c.Measured, c.Note, c.samples, c.errors = nil, "", nil, nil
	}
	c.Predicted, c.InFlight = best.figures, best.inFlight
}

func simulated(ctx context.Context, cfg simulate.Config) (*Figures, error) {
	s, err := simulate.Run(ctx, cfg)
	if err != nil {
		return nil, err
	}
	ms := func(d time.Duration) float64 { return float64(d) / 1e6 }
	return &Figures{PerSecond: s.RequestsPerSecond, MeanMS: ms(s.Latency.Avg), P99MS: ms(s.Latency.P99)}, nil
}

// served is the share of the requests that must be answered.
const served = 0.97

// keeps tells whether the goal is kept, with p99 within share of it.
func (r *Report) keeps(f *Figures, share float64) bool {
	return (r.Goal.P99 == 0 || f.P99MS <= share*float64(r.Goal.P99)/1e6) && f.PerSecond >= f.least && f.PerSecond > 0
}

// score is what is compared: more is better.
func (r *Report) score(f *Figures) float64 {
	if r.Goal.Rate > 0 && f.PerSecond > 0 { // where nothing was answered there is no latency
		return 1 / max(f.MeanMS, 1e-9)
	}
	return f.PerSecond
}

// better tells whether a is the better one: what keeps the goal before what does
// not, then by score; of those that do not keep it, the one that comes nearest.
func (r *Report) better(a, b *Figures, share float64) bool {
	ka, kb := r.keeps(a, share), r.keeps(b, share)
	if ka != kb {
		return ka
	}
	if !ka && r.Goal.P99 > 0 {
		return a.P99MS < b.P99MS
	}
	return r.score(a) > r.score(b)
}

// mostMeasured is how many of the settings are: an eighth, at least two and at most
// four. Measuring is what takes time.
func mostMeasured(settings int) int { return min(4, max(2, settings/8)) }

// finalists are the settings that are worth measuring, p99 being simulated within a share
// of the goal: the best batch size of the best numbers of instances first, since it is
// between these that a simulation errs most (it knows nothing of the CPU time of clients
// and broker), then the next best. None was measured yet.
func (r *Report) finalists(list []*Candidate, share float64) []*Candidate {
	order := slices.DeleteFunc(slices.Clone(list), func(c *Candidate) bool { return c.Measured != nil || c.Note != "" })
	slices.SortStableFunc(order, func(a, b *Candidate) int {
		switch {
		case r.better(a.Predicted, b.Predicted, share):
			return -1
		case r.better(b.Predicted, a.Predicted, share):
			return 1
		}
		return cmp.Compare(a.Instances, b.Instances)
	})
	most := mostMeasured(len(list))
	var chosen []*Candidate
	for _, oneEach := range []bool{true, false} {
		seen := map[int]bool{}
		for _, c := range order {
			near := r.score(c.Predicted) >= 0.8*r.score(order[0].Predicted) && r.keeps(c.Predicted, 1) == r.keeps(order[0].Predicted, 1)
			if len(chosen) < most && (near || len(chosen) == 0) && !slices.Contains(chosen, c) && !(oneEach && seen[c.Instances]) {
				chosen = append(chosen, c)
			}
			seen[c.Instances] = true
		}
	}
	return chosen
}
