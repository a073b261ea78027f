// SPDX-License-Identifier: Apache-2.0

package staffing

import (
	"fmt"
	"math/rand"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
)

// shop is a model whose workers answer a number of requests a second each.
type shop struct {
	r        *rand.Rand
	each     float64 // requests a second
	start    Time    // of a worker
	goal     Time
	most     int
	noise    float64 // of the arrivals
	have     int
	comes    []Time // of workers that start
	workers  int
	queue    float64
	arrived  [20]float64 // in the last steps
	answered [20]float64
	f        Follower
	changes  []string
	refused  float64
	late     Time // the last moment at which a request was refused for the goal
}

const lookTime = 100 * time.Millisecond

func (s *shop) run(now Time, perSecond float64) {
	s.comes = slices.DeleteFunc(s.comes, func(at Time) bool {
		if at <= now {
			s.workers++
		}
		return at <= now
	})
	in := perSecond * lookTime.Seconds() * max(0, 1+s.noise*s.r.NormFloat64())
	out := min(s.queue+in, s.each*lookTime.Seconds()*float64(s.workers))
	s.queue += in - out
	at := int(now/lookTime) % len(s.arrived)
	s.arrived[at], s.answered[at] = in, out
	if most := s.goal.Seconds() * s.each * float64(s.workers); s.goal > 0 && s.queue > most {
		s.refused += s.queue - most
		s.queue, s.late = most, now
	}
	w := Work{Refused: uint64(s.refused), Queued: int(s.queue), Workers: s.workers, Lanes: s.workers, Goal: s.goal, Span: 2 * time.Second}
	w.Busy = min(s.workers, int(out/(s.each*lookTime.Seconds())+0.999))
	for i := range s.arrived {
		w.Requests += uint64(10 * s.arrived[i])
		w.Answered += uint64(10 * s.answered[i])
	}
	w.Requests, w.Answered = w.Requests/10, w.Answered/10
	w.Computed = time.Duration(float64(w.Answered) / s.each * float64(time.Second))
	switch want := s.f.Decide(now, &w, s.have, 1, s.most); {
	case want > s.have:
		for range want - s.have {
			s.comes = append(s.comes, now+s.start)
		}
		s.note(now, want)
	case want < s.have:
		s.workers += want - s.have
		s.note(now, want)
	}
}

func (s *shop) note(now Time, want int) {
	s.changes = append(s.changes, fmt.Sprintf("%v %d", now.Round(time.Second), want))
	s.have = want
}

func TestWorkersFollowTheLoadAsTheScriptsSay(t *testing.T) {
	text, err := os.ReadFile("testdata/follow.txt")
	must.Do(t, err)
	for _, script := range strings.Split(string(text), "\n\n")[1:] {
		lines := strings.Split(strings.TrimSpace(script), "\n")
		t.Run(lines[0], func(t *testing.T) {
			s := &shop{r: rand.New(rand.NewSource(1)), each: 100, start: 3 * time.Second, most: 8, have: 1, workers: 1}
			now := Time(0)
			for _, line := range lines[1:] {
				f := strings.Fields(line)
				switch f[0] {
				case "goal":
					s.goal = duration(t, f[1])
				case "start":
					s.start = duration(t, f[1])
				case "load": // load PER_SECOND DURATION
					rate, err := strconv.ParseFloat(f[1], 64)
					must.Do(t, err)
					s.changes = nil
					for end := now + duration(t, f[2]); now < end; now += lookTime {
						s.run(now, rate)
					}
				case "changes":
					if got := strings.Join(s.changes, ", "); got != strings.Join(f[1:], " ") {
						t.Errorf("changes %s, want %s", got, strings.Join(f[1:], " "))
					}
				case "late-until":
					if got := s.late; got > duration(t, f[1]) {
						t.Errorf("the goal was broken until %v", got)
					}
				}
			}
		})
	}
}

func TestASteadyLoadHasAtMostOneUpAndDownAMinute(t *testing.T) {
	for seed := range int64(30) {
		r := rand.New(rand.NewSource(seed))
		s := &shop{r: r, each: 100, start: Time(r.Intn(10)) * time.Second, most: 8, have: 1 + r.Intn(8), noise: r.Float64()}
		s.workers, s.goal = s.have, Time(r.Intn(2)*200)*time.Millisecond
		load, down := 10+700*r.Float64(), 0
		last := Time(-time.Hour)
		for now := Time(0); now < 20*time.Minute; now += lookTime {
			was := s.have
			if s.run(now, load); s.have < was {
				if now-last < time.Minute {
					t.Errorf("seed %d: two workers ended within %v: %v", seed, now-last, s.changes)
				}
				last = now
				down++
			}
		}
		if need := load / s.each; need < 8 && float64(s.have) < need {
			t.Errorf("seed %d: %d workers for a load of %.1f", seed, s.have, need)
		}
	}
}
