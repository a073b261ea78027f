// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"strings"
)

// why says in a sentence why the choice is the choice.
func (r *Report) why() string {
	choice := r.find(*r.Choice)
	var rival, simulated *Candidate // the best of the others that were measured, and of those that were not
	measured := 0
	for _, c := range r.Candidates {
		switch {
		case c.Measured != nil:
			measured++
			if c != choice && c.Note == "" && r.keeps(&c.Measured.Figures, 1) && (rival == nil || r.score(&c.Measured.Figures) > r.score(&rival.Measured.Figures)) {
				rival = c
			}
		case c != choice && c.Predicted != nil && (simulated == nil || r.better(c.Predicted, simulated.Predicted, margin)):
			simulated = c
		}
	}
	if rival == nil {
		text := fmt.Sprintf("%s is the only one of %d measured that keeps the goal", r.does(&choice.Measured.Figures), measured)
		switch {
		case r.missed > 0:
			text = fmt.Sprintf("%s, within the goal, which others that were to do more did not keep", r.does(&choice.Measured.Figures))
		case measured == 1:
			text = fmt.Sprintf("%s; nothing else was worth measuring", r.does(&choice.Measured.Figures))
			if simulated != nil {
				text += fmt.Sprintf(": simulated, the next best, %s, does %.0f %% of what this one does", simulated.Setting, 100*r.score(simulated.Predicted)/r.score(choice.Predicted))
			}
		}
		return text + r.load(choice)
	}
	others := fmt.Sprintf("the best of the other %d measured, %s, is at %s", measured-1, rival.Setting, r.does(&rival.Measured.Figures))
	if measured == 2 {
		others = fmt.Sprintf("the other one measured, %s, is at %s", rival.Setting, r.does(&rival.Measured.Figures))
	}
	text := r.does(&choice.Measured.Figures) + "; " + others
	if reasons := r.preferred(choice, rival); reasons != "" {
		text += ", which counts as equally good, and has " + reasons
	} else if r.overlap(choice.Measured, rival.Measured) {
		text += ", and their intervals overlap: more --turns would tell them apart"
	}
	return text + r.load(choice)
}

// does is what counts.
func (r *Report) does(f *Figures) string {
	if r.Goal.Rate > 0 {
		return number(f.MeanMS) + " ms on average"
	}
	return number(f.PerSecond) + " requests/s"
}

// load is what a closed loop was measured with.
func (r *Report) load(c *Candidate) string {
	switch c.InFlight {
	case 0:
		return ""
	case 1:
		return " (with one request in flight)"
	}
	return fmt.Sprintf(" (with %d requests in flight)", c.InFlight)
}

// preferred is what the rival has more of, where it is as good or better.
func (r *Report) preferred(choice, rival *Candidate) string {
	if r.score(&choice.Measured.Figures) >= r.score(&rival.Measured.Figures) {
		return ""
	}
	var has []string
	if rival.Instances > choice.Instances {
		has = append(has, "more instances")
	}
	if rival.MaxBatchSize > choice.MaxBatchSize {
		has = append(has, "larger batches")
	} else if rival.MaxBatchSize < choice.MaxBatchSize {
		has = append(has, "less to spare")
	}
	return strings.Join(has, " and ")
}

// overlap tells that the intervals of what counts do.
func (r *Report) overlap(a, b *Measured) bool {
	if r.Goal.Rate > 0 {
		return a.MeanLow <= b.MeanHigh && b.MeanLow <= a.MeanHigh
	}
	return a.PerSecondLow <= b.PerSecondHigh && b.PerSecondLow <= a.PerSecondHigh
}
