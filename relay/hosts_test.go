// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"log/slog"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/relaywire"
)

func TestAHostsWindowFollowsWhatItReports(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name                 string
		queue, compute, took time.Duration
		grows, shrinks       bool
	}{
		{"it has nothing to do", ms, 10 * ms, 12 * ms, true, false},
		{"one batch waits behind another", 10 * ms, 10 * ms, 21 * ms, false, false},
		{"many wait", 30 * ms, 10 * ms, 41 * ms, false, true},
		{"it waits, but not as long as the way takes", ms, ms / 10, 10 * ms, false, false},
	} {
		h := newHosts(slog.New(slog.DiscardHandler), LeastRequest, 32).add("h")
		h.window, h.inFlight = 4, 4
		for range 10 {
			h.answered(relaywire.Load{Queue: c.queue, Compute: c.compute}, true, c.took)
		}
		if (h.window > 4) != c.grows || (h.window < 4) != c.shrinks {
			t.Errorf("%s: the window went from 4 to %.1f", c.name, h.window)
		}
	}
}
