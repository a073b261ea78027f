// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"fmt"
	"os"
	"strings"
)

// noSlope compares the second quarter with the last: what grows with time
// shows there.
func (r *run) noSlope(all []sample) {
	mean := func(part []sample, f func(*sample) float64) float64 {
		sum := 0.0
		for i := range part {
			sum += f(&part[i])
		}
		return sum / float64(len(part))
	}
	q := len(all) / 4
	for _, c := range []struct {
		what  string
		slack float64
		f     func(*sample) float64
	}{
		{"broker RSS in MiB", 4, func(s *sample) float64 { return float64(s.broker.RSS) / (1 << 20) }},
		{"broker descriptors", 4, func(s *sample) float64 { return float64(s.broker.FDs) }},
		{"broker threads", 3, func(s *sample) float64 { return float64(s.broker.Threads) }},
		{"client RSS in MiB", 4, func(s *sample) float64 { return float64(s.client.RSS) / (1 << 20) }},
		{"client descriptors", 2, func(s *sample) float64 { return float64(s.client.FDs) }},
	} {
		early, late := mean(all[q:2*q], c.f), mean(all[len(all)-q:], c.f)
		r.check(late <= early*1.1+c.slack, "%s rose from %.1f to %.1f", c.what, early, late)
		fmt.Printf("   %s: %.1f in the second quarter, %.1f in the last\n", c.what, early, late)
	}
}

func tableSoak(all []sample, seed uint64, path string) error {
	var t strings.Builder
	fmt.Fprintf(&t, "| minute | right answers | mishaps | broker RSS, MiB | broker fds | broker threads | client RSS, MiB | client "+
		"fds | p50, ms | p99, ms |\n|---|---|---|---|---|---|---|---|---|---|\n")
	step := max(1, len(all)/20)
	for i := 0; i < len(all); i += step {
		s := &all[i]
		fmt.Fprintf(&t, "| %.1f | %d | %d | %.1f | %d | %d | %.1f | %d | %.2f | %.2f |\n", s.at.Minutes(), s.OK, s.kills,
			float64(s.broker.RSS)/(1<<20), s.broker.FDs, s.broker.Threads, float64(s.client.RSS)/(1<<20), s.client.FDs, float64(s.P50)/1e6,
			float64(s.P99)/1e6)
	}
	return os.WriteFile(path, []byte(fmt.Sprintf("Seed %d.\n\n", seed)+t.String()), 0o644)
}
