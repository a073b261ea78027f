// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/stats"
)

// snapshot is what the broker said, or why it said nothing.
type snapshot struct {
	at      time.Time
	err     error
	stats   *stats.Broker
	model   string         // whose batches they are
	batches *stats.Batches // since the last time; nil if there are none to be had
	missed  bool           // there were more than the broker remembers
}

// feed asks the broker, one question at a time.
type feed struct {
	admin *admin.Client
	got   chan snapshot
	known map[string]uint64 // batches that were told already, by model
}

const patience = 5 * time.Second // with a broker that does not answer

func newFeed(socket string) *feed {
	return &feed{admin: admin.New(socket), got: make(chan snapshot, 1), known: map[string]uint64{}}
}

// ask has an answer come into f.got. The one before must have come.
func (f *feed) ask(ctx context.Context, model string) {
	go func() {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		f.got <- f.take(ctx, model)
	}()
}

func (f *feed) take(ctx context.Context, model string) snapshot {
	s := snapshot{model: model}
	s.stats, s.err = f.admin.Stats(ctx)
	s.at = time.Now()
	if s.err != nil {
		clear(f.known) // the next broker counts anew
		return s
	}
	if model == "" && len(s.stats.Models) > 0 {
		s.model = s.stats.Models[0].Name
	}
	if s.stats.Model(s.model) != nil {
		if b, err := f.admin.Batches(ctx, s.model, f.known[s.model]); err == nil { // else it went just now
			s.missed = b.Count-min(f.known[s.model], b.Count) > uint64(len(b.Batches))
			s.batches = b
			f.known[s.model] = b.Count
		}
	}
	return s
}
