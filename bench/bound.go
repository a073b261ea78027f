// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/tools/load"
)

// bound is measured in turns with the results, because machines drift.
type bound struct {
	full   *alone // the upper bound: the model's processes feed themselves full batches
	single *alone // of a single producer: the model alone on its requests
}

// startBound returns nil without --bound.
func (f *fleet) startBound(cfg *config, say *progress.Line) (*bound, error) {
	if !cfg.Bound {
		return nil, nil
	}
	full, err := f.startAlone(cfg, cfg.ModelNum, cfg.MaxBatchSize, say)
	if err != nil {
		return nil, err
	}
	b := &bound{full: full}
	if cfg.WorkerNum == 1 && cfg.InFlight == 1 && !cfg.NoDynamicBatch {
		b.single, err = f.startAlone(cfg, 1, cfg.WorkerBatch, say)
	}
	return b, err
}

// run measures the next window of both.
func (b *bound) run(f *fleet, cfg *config, full, single *[]*load.Window, say *progress.Line) error {
	for _, p := range []struct {
		what string
		of   *alone
		to   *[]*load.Window
	}{{"the bound", b.full, full}, {"the model alone", b.single, single}} {
		if p.of == nil {
			continue
		}
		w, err := p.of.Run(f.Context(), load.Rewarm, cfg.Duration.D())
		if err != nil {
			return fmt.Errorf("measure %s: %w", p.what, err)
		}
		*p.to = append(*p.to, w)
		say.Say("%s: window %d, %s", p.what, len(*p.to), w)
	}
	return nil
}
