// SPDX-License-Identifier: Apache-2.0

package bench

import "math/rand/v2"

// schedule gives the times at which an open loop sends: Poisson arrivals, the
// same for the same seed. It never looks at what happened to earlier requests.
type schedule struct {
	rnd  *rand.Rand
	gap  float64 // mean, in nanoseconds
	next float64
}

func newSchedule(start int64, perSecond float64, seed uint64) *schedule {
	return &schedule{rnd: rand.New(rand.NewPCG(seed, 1)), gap: 1e9 / perSecond, next: float64(start)}
}

// arrival is the next intended send time, in nanoseconds.
func (s *schedule) arrival() int64 {
	s.next = min(s.next+s.rnd.ExpFloat64()*s.gap, 1<<62) // more would not be a time any more
	return int64(s.next)
}
