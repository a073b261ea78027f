// SPDX-License-Identifier: Apache-2.0

package core

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/status"
)

// counters count a model's requests of this gateway. The broker counts batches, of
// all clients.
type counters struct {
	ok, failed                            atomic.Uint64
	okNS, failedNS                        atomic.Uint64
	queueNS, inputNS, computeNS, outputNS atomic.Uint64
	lastMS                                atomic.Uint64
}

// Count adds an ended call.
func (c *Call) Count(err error) {
	k := &c.Model.counts
	now := time.Now()
	total := uint64(now.Sub(c.began))
	if err != nil {
		if errors.Is(err, status.ErrDraining) { // not ready, until the broker is asked again
			c.Model.G.Models.broker.Store(&err)
		}
		k.failed.Add(1)
		k.failedNS.Add(total)
		return
	}
	k.okNS.Add(total)
	k.queueNS.Add(uint64(c.queue))
	k.inputNS.Add(uint64(c.filled.Sub(c.began)))
	k.computeNS.Add(uint64(c.compute))
	k.outputNS.Add(uint64(now.Sub(c.Ended)))
	k.lastMS.Store(uint64(now.UnixMilli()))
	k.ok.Add(1)
}

// Statistics returns those of a model, or of all models if the name is empty.
func (g *Gateway) Statistics(ctx context.Context, name, version string) (*oip.ModelStatisticsResponse, error) {
	list := g.Models.List()
	if name != "" {
		k, _, err := g.Models.About(ctx, name, version)
		if err != nil {
			return nil, err
		}
		list = []*Model{k}
	}
	counted, err := g.admin.Stats(ctx)
	if err != nil {
		return nil, err
	}
	all := &oip.ModelStatisticsResponse{}
	for _, k := range list {
		all.ModelStats = append(all.ModelStats, k.statistics(counted.Model(k.Name)))
	}
	return all, nil
}

func (k *Model) statistics(b *stats.Model) *oip.ModelStatistics {
	c := &k.counts
	ok := c.ok.Load() // one count everywhere: load tools stop at a difference
	d := func(ns *atomic.Uint64) *oip.StatisticDuration {
		return &oip.StatisticDuration{Count: ok, Ns: ns.Load()}
	}
	s := &oip.ModelStatistics{
		Name: k.Name, Version: modelVersion, LastInference: c.lastMS.Load(),
		InferenceStats: &oip.InferStatistics{
			Success: d(&c.okNS), Fail: &oip.StatisticDuration{Count: c.failed.Load(), Ns: c.failedNS.Load()},
			Queue: d(&c.queueNS), ComputeInput: d(&c.inputNS), ComputeInfer: d(&c.computeNS), ComputeOutput: d(&c.outputNS),
			CacheHit: &oip.StatisticDuration{}, CacheMiss: &oip.StatisticDuration{},
		},
	}
	if b == nil {
		return s
	}
	s.InferenceCount, s.ExecutionCount = b.Rows, b.Batches
	for size, n := range b.BatchSize.Histogram {
		s.BatchStats = append(s.BatchStats, &oip.InferBatchStatistics{
			BatchSize: uint64(size), ComputeInput: &oip.StatisticDuration{Count: n},
			ComputeInfer: &oip.StatisticDuration{Count: n}, ComputeOutput: &oip.StatisticDuration{Count: n},
		})
	}
	slices.SortFunc(s.BatchStats, func(x, y *oip.InferBatchStatistics) int { return int(x.BatchSize) - int(y.BatchSize) })
	return s
}
