// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/progress"
)

// bound is measured in turns with the results, because machines drift.
type bound struct {
	full   *crowd // the upper bound: the model's processes feed themselves full batches
	single *crowd // of a single producer: the model alone on its requests
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

// boundWindows are the windows of a bound.
type boundWindows struct{ full, single []*window }

// run measures the next window of both.
func (b *bound) run(f *fleet, cfg *config, to *boundWindows, say *progress.Line) error {
	w, err := b.full.run(f, rewarm, cfg.Duration.d())
	if err != nil {
		return fmt.Errorf("measure the bound: %w", err)
	}
	to.full = append(to.full, w)
	say.Say("bound: window %d, %s items/s", len(to.full), printable.Number(w.itemsPerS))
	if b.single == nil {
		return nil
	}
	if w, err = b.single.run(f, rewarm, cfg.Duration.d()); err != nil {
		return fmt.Errorf("measure the model alone: %w", err)
	}
	to.single = append(to.single, w)
	say.Say("model alone: window %d, %s ms", len(to.single), printable.Number(w.sample().Latency/1e6))
	return nil
}

// boundResult is the key "bound".
type boundResult struct {
	ItemsPerS float64   `json:"items_per_s"`
	Latency   latencies `json:"latency_ms"`
	CPU       float64   `json:"cpu_us_per_item"`
	Windows   []float64 `json:"windows_items_per_s"`
}

// boundOf summarizes the bound's windows, of which the last three count.
func boundOf(windows []*window) *boundResult {
	r := summarize(windows, true, minWindows)
	perItem := r.CPU.Client * r.Throughput / max(r.ItemsPerS, 1)
	return &boundResult{ItemsPerS: r.ItemsPerS, Latency: r.Latency, CPU: perItem, Windows: r.Windows}
}

// compare puts the bound beside a result.
func (r *result) compare(b *boundWindows) {
	if len(b.full) > 0 {
		r.Bound = boundOf(b.full)
		r.RatioToBound = r.ItemsPerS / max(r.Bound.ItemsPerS, 1e-9)
	}
	if len(b.single) > 0 {
		r.Alone = boundOf(b.single)
		r.RatioToAlone = r.Latency.Avg / max(r.Alone.Latency.Avg, 1e-9)
	}
}
