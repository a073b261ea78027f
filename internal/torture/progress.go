// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"fmt"
	"strings"
	"time"
)

// every is how often progress is shown.
const every = 10 * time.Second

// report shows progress until it is stopped.
func (t *torture) report() (stop func()) {
	over, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-over:
				return
			case <-tick.C:
				fmt.Fprintln(t.Out, t.progress())
			}
		}
	}()
	return func() { close(over); <-ended }
}

// progress is how far it is, and how long the rest will take at the rates seen
// so far.
func (t *torture) progress() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	under := map[string]int{} // events done in slices under way
	open := map[string]int{}  // and still to come in them
	for r := range t.running {
		if r.Part == "soak" {
			r.done = min(r.Events, int(time.Since(r.began)/time.Minute))
		}
		under[r.Part] += r.done
		open[r.Part] += r.Events - min(r.done, r.Events)
	}
	var now []string
	var rest time.Duration
	unknown := 0
	for i := range t.Parts {
		p := &t.Parts[i]
		todo, waiting := open[p.Name], 0
		for _, s := range t.left[p.Name] {
			waiting += s.Events
		}
		rate := t.rate[p.Name]
		for r := range t.running {
			if took := time.Since(r.began).Seconds(); r.Part == p.Name && r.done > 0 && rate == 0 {
				rate = float64(r.done) / took
			}
		}
		if todo > 0 {
			now = append(now, fmt.Sprintf("%s: %d of %d %s", p.Name, p.Target-waiting-todo, p.Target, p.Unit))
		}
		switch {
		case todo+waiting == 0:
		case p.Name == "soak":
			rest += time.Duration(todo+waiting) * time.Minute
		case rate == 0:
			unknown++
		default:
			rest += time.Duration(float64(todo+waiting) / rate / float64(t.jobs(p)) * float64(time.Second))
		}
	}
	line := fmt.Sprintf("%v: %s; about %v left", time.Since(t.began).Round(time.Second), strings.Join(now, ", "), rest.Round(time.Second))
	if unknown > 0 {
		line += fmt.Sprintf(", and %d parts whose rate is not known yet", unknown)
	}
	if t.failed > 0 {
		line += fmt.Sprintf("; %d slices FAILED", t.failed)
	}
	return line
}
