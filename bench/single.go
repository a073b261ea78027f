package main

import (
	"context"
	"fmt"
)

// runSingle measures one configuration, with its bound.
func runSingle(ctx context.Context, cfg *config, say *progress) (*result, error) {
	f, err := newFleet(ctx)
	if err != nil {
		return nil, err
	}
	defer f.close()
	var r *result
	bound, err := withBound(f, cfg, say, func() (err error) {
		r, err = measureOnce(f, cfg, cfg.WorkerNum, say)
		return err
	})
	if err != nil {
		return nil, err
	}
	r.Config, r.Note = cfg, cfg.note()
	r.compare(bound)
	return r, nil
}

// measureOnce is one point: through the broker, or every producer on its own.
func measureOnce(f *fleet, cfg *config, producers int, say *progress) (*result, error) {
	if cfg.NoDynamicBatch {
		return f.alone(cfg, producers, cfg.WorkerBatch, fmt.Sprintf("%d processes on their own", producers), say)
	}
	s, err := f.serve(cfg, say)
	if err != nil {
		return nil, err
	}
	defer s.end()
	return s.through(producers, say)
}

// sweep is the JSON of --concurrency_range.
type sweep struct {
	Config *config      `json:"config"`
	Note   string       `json:"note,omitempty"`
	Bound  *boundResult `json:"bound,omitempty"`
	Points []*result    `json:"points"`
}

// runSweep measures one configuration with different numbers of producers.
func runSweep(ctx context.Context, cfg *config, say *progress) (*sweep, error) {
	f, err := newFleet(ctx)
	if err != nil {
		return nil, err
	}
	defer f.close()
	s := &sweep{Config: cfg, Note: cfg.note()}
	s.Bound, err = withBound(f, cfg, say, func() (err error) {
		s.Points, err = sweepPoints(f, cfg, cfg.Concurrency.values(), say)
		return err
	})
	for _, p := range s.Points {
		p.compare(s.Bound)
		p.Bound = nil // said once
	}
	return s, err
}

func sweepPoints(f *fleet, cfg *config, counts []int, say *progress) ([]*result, error) {
	var points []*result
	var s *serving
	if !cfg.NoDynamicBatch {
		var err error
		if s, err = f.serve(cfg, say); err != nil {
			return nil, err
		}
		defer s.end()
	}
	for _, n := range counts {
		var r *result
		var err error
		if s != nil {
			r, err = s.through(n, say)
		} else {
			r, err = measureOnce(f, cfg, n, say)
		}
		if err != nil {
			return points, err
		}
		r.Concurrency = n
		points = append(points, r)
	}
	return points, nil
}
