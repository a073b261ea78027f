// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/status"
)

// Patience is how long a model may have no worker before nobody waits for one any more.
type Patience struct {
	Time time.Duration // 0: for ever
	// Starting is the same while the broker starts one; 0: for ever.
	Starting time.Duration
}

// UsualPatience is that of a model that somebody else serves: how long its workers take to
// start is not known, but one that takes longer than this hangs.
var UsualPatience = Patience{Time: 10 * time.Second, Starting: 10 * time.Minute}

// AwaitNoWorker returns an error when the model has had no worker for so long: what is in
// flight would wait for ever. It returns nil when ctx ends.
func AwaitNoWorker(ctx context.Context, a *admin.Client, model string, patience Patience) error {
	poll := time.Second
	if patience.Time > 0 {
		poll = min(poll, patience.Time/2)
	}
	none := absence{patience: patience, worker: time.Now(), hope: time.Now()}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(poll):
		}
		s, err := a.Stats(ctx)
		if err != nil {
			s = nil // a broker that has gone ends what is in flight
		}
		if d := none.see(s, model, time.Now()); d > 0 {
			return fmt.Errorf("%w: model %q has had none for %v", status.ErrNoWorker, model, d)
		}
	}
}

// absence is since when there is no worker, and nothing that becomes one.
type absence struct {
	patience     Patience
	worker, hope time.Time // when there was one last
}

// see looks at the broker. It returns the patience that is over, if one is.
func (n *absence) see(s *stats.Broker, model string, now time.Time) time.Duration {
	if s == nil {
		n.worker, n.hope = now, now
	} else if _, _, err := workersOf(s, model); !errors.Is(err, status.ErrNoWorker) {
		n.worker, n.hope = now, now
	} else if onItsWay(s, model) {
		n.hope = now
	}
	switch p := n.patience; {
	case p.Time <= 0:
		return 0
	case now.Sub(n.hope) >= p.Time:
		return p.Time
	case p.Starting > 0 && now.Sub(n.worker) >= p.Starting:
		return p.Starting
	}
	return 0
}

// DeadLives is how often a process may end before it attaches until it counts as
// one that never will.
const DeadLives = 2

// onItsWay tells that the broker starts a process that may serve the model: again, if it
// crashed. One whose worker is there and takes no batches will not.
func onItsWay(s *stats.Broker, model string) bool {
	serves := []string{"", model} // it may not say which
	if m := s.Model(model); m != nil {
		serves = append(serves, m.Stages...)
	}
	return slices.ContainsFunc(s.Processes, func(p stats.Process) bool {
		starts := !p.Client && p.Sessions == 0 && p.State != "stopped"
		return starts && p.FailedStarts < DeadLives && slices.Contains(serves, p.Model)
	})
}
