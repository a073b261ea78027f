// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"slices"
)

// choose takes the usable host with the fewest batches in flight, and counts a call
// to it. Hosts that the batch has not been at go first, then hosts with room in
// their window. Equal hosts take turns. It returns nil if no host is usable.
func (p *hosts) choose(been []*host, cancel context.CancelCauseFunc) *call {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turn++
	var best *host
	for i := range p.all {
		if h := p.all[(p.turn+i)%len(p.all)]; h.usable && (best == nil || h.isBetter(best, been)) {
			best = h
		}
	}
	if best == nil {
		return nil
	}
	return best.beginCall(cancel)
}

func (h *host) isBetter(other *host, been []*host) bool {
	if a, b := slices.Contains(been, h), slices.Contains(been, other); a != b {
		return b
	}
	if a, b := h.inFlight < int(h.window), other.inFlight < int(other.window); a != b {
		return a
	}
	return h.inFlight < other.inFlight
}

// others reports whether a usable host is left that the batch has not been at.
func (p *hosts) others(been []*host) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.all, func(h *host) bool { return h.usable && !slices.Contains(been, h) })
}
