// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"slices"
)

// choose takes the host with the fewest batches on their way: among hosts that have room and that the batch was not at yet, else
// among hosts that it was not at, else among all. It returns nil if there is none.
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
		h = p.leastRequest(roomy)
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
