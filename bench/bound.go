package main

// The upper bound: as many processes as the model has, each feeding itself
// full batches, nothing in between.

// startBound starts those processes; nil if the bound is not wanted.
func (f *fleet) startBound(cfg *config, say *progress) (*crowd, error) {
	if !cfg.Bound {
		return nil, nil
	}
	return f.startAlone(cfg, cfg.ModelNum, cfg.MaxBatchSize, say)
}

// boundResult is the key "bound".
type boundResult struct {
	ItemsPerS float64   `json:"items_per_s"`
	Latency   latencies `json:"latency_ms"`
	CPU       float64   `json:"cpu_us_per_item"`
	Windows   []float64 `json:"windows_items_per_s"`
}

// boundOf makes a result of the bound's windows. As with the windows they are
// compared with, the last three count.
func boundOf(windows []*window) *boundResult {
	r := summarize(windows, true)
	perItem := r.CPU.Client * r.Throughput / max(r.ItemsPerS, 1)
	return &boundResult{ItemsPerS: r.ItemsPerS, Latency: r.Latency, CPU: perItem, Windows: r.Windows}
}

// compare puts the bound beside a result.
func (r *result) compare(b *boundResult) {
	if b != nil && b.ItemsPerS > 0 {
		r.Bound, r.RatioToBound = b, r.ItemsPerS/b.ItemsPerS
	}
}
