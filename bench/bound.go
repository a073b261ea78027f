package main

import "fmt"

// bounds measures the upper bound in two sittings, before and after what is
// compared with it: machines drift, and a bound from another minute is worth
// little.
type bounds struct {
	sittings []*result
}

// sit measures the bound once: as many processes as the model has, each
// feeding itself full batches, nothing in between.
func (b *bounds) sit(f *fleet, cfg *config, say *progress) error {
	if !cfg.Bound {
		return nil
	}
	r, err := f.alone(cfg, cfg.ModelNum, cfg.MaxBatchSize, fmt.Sprintf("bound, %d × %d", cfg.ModelNum, cfg.MaxBatchSize), say)
	if err != nil {
		return fmt.Errorf("measure the bound: %w", err)
	}
	b.sittings = append(b.sittings, r)
	return nil
}

// result is the mean of the sittings; nil if the bound was not wanted.
func (b *bounds) result() *boundResult {
	if len(b.sittings) == 0 {
		return nil
	}
	r := &boundResult{Stable: true, Latency: b.sittings[0].Latency}
	for _, s := range b.sittings {
		r.Sittings = append(r.Sittings, s.ItemsPerS)
		r.ItemsPerS += s.ItemsPerS / float64(len(b.sittings))
		r.Stable = r.Stable && s.Stable
	}
	return r
}

// compare puts the bound beside a result.
func (r *result) compare(b *boundResult) {
	if b != nil && b.ItemsPerS > 0 {
		r.Bound, r.RatioToBound = b, r.ItemsPerS/b.ItemsPerS
	}
}

// withBound runs something between two sittings of the bound.
func withBound(f *fleet, cfg *config, say *progress, run func() error) (*boundResult, error) {
	var b bounds
	if err := b.sit(f, cfg, say); err != nil {
		return nil, err
	}
	if err := run(); err != nil {
		return nil, err
	}
	if err := b.sit(f, cfg, say); err != nil {
		return nil, err
	}
	return b.result(), nil
}
