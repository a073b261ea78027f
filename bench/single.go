// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"

	"github.com/ringbatch/ringbatch/internal/progress"
)

// runSingle measures one configuration, with its bound.
func runSingle(ctx context.Context, cfg *config, say *progress.Line) (*result, error) {
	f, err := newFleet(ctx)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	bound, err := f.startBound(cfg, say)
	if err != nil {
		return nil, err
	}
	r, err := measureOnce(f, cfg, cfg.WorkerNum, bound, say)
	if err != nil {
		return nil, err
	}
	r.Config, r.Note = cfg, cfg.note()
	return r, nil
}

// measureOnce is one point: through the broker, or every producer on its own.
func measureOnce(f *fleet, cfg *config, producers int, bound *bound, say *progress.Line) (*result, error) {
	if cfg.NoDynamicBatch {
		return f.alone(cfg, producers, cfg.WorkerBatch, bound, say)
	}
	s, err := f.serve(cfg, say)
	if err != nil {
		return nil, err
	}
	defer s.end()
	return s.through(producers, bound, say)
}

// sweep is the JSON of --concurrency_range.
type sweep struct {
	Config *config      `json:"config"`
	Note   string       `json:"note,omitempty"`
	Bound  *boundResult `json:"bound,omitempty"` // the mean of the points' bounds
	Points []*result    `json:"points"`
}

// runSweep measures one configuration with different numbers of producers.
func runSweep(ctx context.Context, cfg *config, say *progress.Line) (*sweep, error) {
	f, err := newFleet(ctx)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	bound, err := f.startBound(cfg, say)
	if err != nil {
		return nil, err
	}
	s := &sweep{Config: cfg, Note: cfg.note()}
	if s.Points, err = sweepPoints(f, cfg, cfg.Concurrency.values(), bound, say); err != nil {
		return nil, err
	}
	s.meanBound()
	return s, nil
}

// meanBound is the bound as it was in turns with all points; its latencies
// are those of the first.
func (s *sweep) meanBound() {
	for _, p := range s.Points {
		if p.Bound == nil {
			continue
		}
		if s.Bound == nil {
			s.Bound = &boundResult{Latency: p.Bound.Latency}
		}
		s.Bound.ItemsPerS += p.Bound.ItemsPerS / float64(len(s.Points))
		s.Bound.CPU += p.Bound.CPU / float64(len(s.Points))
		s.Bound.Windows = append(s.Bound.Windows, p.Bound.Windows...)
	}
}

// sweepPoints keeps one broker and its workers for all points.
func sweepPoints(f *fleet, cfg *config, counts []int, bound *bound, say *progress.Line) ([]*result, error) {
	measure := func(n int) (*result, error) { return measureOnce(f, cfg, n, bound, say) }
	if !cfg.NoDynamicBatch {
		s, err := f.serve(cfg, say)
		if err != nil {
			return nil, err
		}
		defer s.end()
		measure = func(n int) (*result, error) { return s.through(n, bound, say) }
	}
	var points []*result
	for _, n := range counts {
		r, err := measure(n)
		if err != nil {
			return points, err
		}
		r.Concurrency = n
		points = append(points, r)
	}
	return points, nil
}
