// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/policy"
)

// The grid of deadlines: in every cell all requests have the same time, and what the
// batcher refuses is held against the same run in which it knows of no deadline, and so
// refuses nothing.

// deadlineLimit of the requests may be taken and then miss their deadline, and may be
// refused though they are in time where nothing is refused.
const deadlineLimit = 0.01

// deadlineTimes are how much time requests have, in full batches with all workers busy.
var deadlineTimes = []float64{1.5, 2.5, 4}

// DeadlineGridResult is what `simulate --grid=deadline` prints with --json.
type DeadlineGridResult struct{ judged[DeadlineCellResult] }

// DeadlineCellResult is one deadline in one cell. All shares are of the requests.
type DeadlineCellResult struct {
	Name       string  `json:"name"`
	DeadlineMS float64 `json:"deadline_ms"`
	Requests   int     `json:"requests"`
	InTime     float64 `json:"in_time"`
	Refused    float64 `json:"refused"` // when they arrived
	Expired    float64 `json:"expired"` // after they had waited
	Late       float64 `json:"late"`    // computed for nobody
	// Without refusals: in time, and of those, what was refused.
	InTimeAnyway  float64 `json:"in_time_without_refusals"`
	RefusedInVain float64 `json:"refused_in_vain"`
	Overload      bool    `json:"overload"`
	Miss          string  `json:"miss,omitempty"` // what was not kept
}

// fate is what became of a request.
type fate uint8

const (
	unanswered fate = iota
	inTime
	refusedOnArrival
)

func runDeadlineCell(ctx context.Context, c gridCell) (results []DeadlineCellResult, err error) {
	full := c.cfg.took(c.cfg.Policy.MaxBatchSize, c.cfg.Workers.Count-1)
	for _, batches := range deadlineTimes {
		cfg := c.cfg
		cfg.Policy.WaitTime = policy.Auto
		cfg.Load.Deadline = time.Duration(batches * full)
		r, fates, err := runFates(ctx, cfg)
		if err != nil {
			return nil, err
		}
		cfg.hideDeadlines = true
		_, anyway, err := runFates(ctx, cfg)
		if err != nil {
			return nil, err
		}
		results = append(results, judgeDeadline(&cfg, c, r, fates, anyway))
	}
	return results, nil
}

func runFates(ctx context.Context, cfg Config) (*Result, []fate, error) {
	cfg.fates = make([]fate, cfg.Requests)
	r, err := Run(ctx, cfg)
	return r, cfg.fates, err
}

func judgeDeadline(cfg *Config, c gridCell, r *Result, fates, anyway []fate) DeadlineCellResult {
	requests := float64(cfg.Requests)
	out := DeadlineCellResult{
		Name: c.name, DeadlineMS: milliseconds(cfg.Load.Deadline), Requests: cfg.Requests, Overload: c.overload,
		InTime: float64(r.Outcomes.Completed) / requests, Refused: float64(r.Outcomes.Refused) / requests,
		Expired: float64(r.Outcomes.Expired) / requests, Late: float64(r.Outcomes.Late) / requests,
	}
	for i := range fates {
		if anyway[i] == inTime {
			out.InTimeAnyway += 1 / requests
			if fates[i] == refusedOnArrival {
				out.RefusedInVain += 1 / requests
			}
		}
	}
	var misses []string
	if out.Expired+out.Late > deadlineLimit {
		misses = append(misses, "taken and missed")
	}
	// Under overload what is refused makes room for others.
	if out.RefusedInVain > deadlineLimit && out.InTime < out.InTimeAnyway-deadlineLimit {
		misses = append(misses, "refused in vain")
	}
	out.Miss = strings.Join(misses, ", ")
	return out
}

func (c DeadlineCellResult) missed() bool { return c.Miss != "" }

// WriteText writes what holds, and a line for each cell that does not.
func (g *DeadlineGridResult) WriteText(w io.Writer) error {
	var b strings.Builder
	expired, late, inVain, gain := 0.0, 0.0, 0.0, math.Inf(1)
	for _, c := range g.Cells {
		expired, late, inVain = max(expired, c.Expired), max(late, c.Late), max(inVain, c.RefusedInVain)
		gain = min(gain, c.InTime-c.InTimeAnyway)
	}
	fmt.Fprintf(&b, "deadlines in %d cells: %d do not hold\n", len(g.Cells), g.Misses)
	fmt.Fprintf(&b, "of the requests at most %.2f %% expired after they had waited and %.2f %% were computed too late; %.2f %% were refused that are in time without refusals; in time at least %+.2f %% more than without refusals\n",
		100*expired, 100*late, 100*inVain, 100*gain)
	writeMisses(&b, "missed\tin time\twithout refusals\trefused\tin vain\texpired\tlate\tdeadline\tcell", g.Cells, func(c DeadlineCellResult) string {
		return fmt.Sprintf("%s\t%.1f %%\t%.1f %%\t%.2f %%\t%.2f %%\t%.2f %%\t%.2f %%\t%.3g ms\t%s", c.Miss, 100*c.InTime, 100*c.InTimeAnyway, 100*c.Refused, 100*c.RefusedInVain, 100*c.Expired, 100*c.Late, c.DeadlineMS, c.Name)
	})
	_, err := io.WriteString(w, b.String())
	return err
}
