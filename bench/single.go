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
