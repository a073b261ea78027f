// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"math"
	"slices"
)

// choose takes a host for a batch, by the route: among those that have room and
// that the batch was not at yet, else among those that have room, else the one
// with the least to do. nil if there is none.
func (p *hosts) choose(been []*host, cancel context.CancelCauseFunc) *call {
	p.mu.Lock()
	defer p.mu.Unlock()
	var usable, fresh, roomy []*host
	for _, h := range p.all {
		if !h.usable {
			continue
		}
		usable = append(usable, h)
		if slices.Contains(been, h) {
			continue
		}
		fresh = append(fresh, h)
		if h.inFlight < int(h.window) {
			roomy = append(roomy, h)
		}
	}
	var h *host
	switch {
	case len(roomy) > 0:
		h = p.byRoute(roomy)
	case len(fresh) > 0:
		h = p.leastRequest(fresh)
	case len(usable) > 0:
		h = p.leastRequest(usable)
	default:
		return nil
	}
	return h.begin(cancel)
}

// others tells that a host could be chosen at which the batch was not yet.
func (p *hosts) others(been []*host) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.all, func(h *host) bool { return h.usable && !slices.Contains(been, h) })
}

func (p *hosts) byRoute(list []*host) *host {
	switch p.route {
	case RoundRobin:
		p.turn++
		return list[p.turn%len(list)]
	case Weighted:
		return p.weighted(list)
	case Fill:
		return list[0] // they are in the order of their names
	}
	return p.leastRequest(list)
}

// leastRequest goes round among equals.
func (p *hosts) leastRequest(list []*host) *host {
	p.turn++
	best := list[p.turn%len(list)]
	for i := range list {
		if h := list[(p.turn+i)%len(list)]; h.inFlight < best.inFlight {
			best = h
		}
	}
	return best
}

// weighted is stride scheduling by what each host reports that it can do.
func (p *hosts) weighted(list []*host) *host {
	best := slices.MinFunc(list, func(a, b *host) int {
		switch {
		case a.pass < b.pass:
			return -1
		case a.pass > b.pass:
			return 1
		}
		return 0
	})
	best.pass += 1 / p.weight(best)
	return best
}

// weight is the rows a second that a host would do at full use; of one that has
// not reported, the mean of the others.
func (p *hosts) weight(h *host) float64 {
	own := func(h *host) float64 {
		if h.load.Utilization <= 0 {
			return 0
		}
		return h.load.PerSecond / h.load.Utilization
	}
	if w := own(h); w > 0 {
		return w
	}
	sum, n := 0.0, 0
	for _, x := range p.all {
		if w := own(x); w > 0 {
			sum, n = sum+w, n+1
		}
	}
	if n == 0 {
		return 1
	}
	return sum / float64(n)
}

// leastPass is where a host that comes begins, so that it has nothing to catch
// up with. The caller holds mu.
func (p *hosts) leastPass() float64 {
	least := math.Inf(1)
	for _, h := range p.all {
		if h.usable {
			least = min(least, h.pass)
		}
	}
	if math.IsInf(least, 1) {
		return 0
	}
	return least
}
