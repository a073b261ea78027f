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

// Patience is how long a model may be without workers. 0 is without a limit.
type Patience struct {
	Time     time.Duration // while the broker starts none
	Starting time.Duration // while the broker starts a worker
}

// UsualPatience is the patience with a model whose workers take an unknown time to start.
var UsualPatience = Patience{Time: 10 * time.Second, Starting: 10 * time.Minute}

// AwaitNoWorker returns an error when the model has had no worker for longer than patience:
// requests in flight would not end. It returns nil when ctx ends.
func AwaitNoWorker(ctx context.Context, a *admin.Client, model string, patience Patience) error {
	poll := time.Second
	if patience.Time > 0 {
		poll = min(poll, patience.Time/2)
	}
	none := absence{patience: patience, worker: time.Now(), start: time.Now()}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(poll):
		}
		s, err := a.Stats(ctx)
		if err != nil {
			s = nil // requests in flight end if the broker is gone
		}
		if d := none.exceeded(s, model, time.Now()); d > 0 {
			return fmt.Errorf("%w: model %q has had none for %v", status.ErrNoWorker, model, d)
		}
	}
}

// absence keeps how long a model has had no worker.
type absence struct {
	patience Patience
	worker   time.Time // when the model last had a worker
	start    time.Time // when the broker last started one, or the model had one
}

// exceeded returns the limit of patience that is exceeded, or 0. s is nil without a broker.
func (n *absence) exceeded(s *stats.Broker, model string, now time.Time) time.Duration {
	var err error
	if s != nil {
		_, _, err = workersOf(s, model)
	}
	if !errors.Is(err, status.ErrNoWorker) {
		n.worker, n.start = now, now
	} else if isStarting(s, model) {
		n.start = now
	}
	switch p := n.patience; {
	case p.Time <= 0:
		return 0
	case now.Sub(n.start) >= p.Time:
		return p.Time
	case p.Starting > 0 && now.Sub(n.worker) >= p.Starting:
		return p.Starting
	}
	return 0
}

// DeadLives is the number of starts without an attachment after which a process counts as
// broken.
const DeadLives = 2

// isStarting reports whether the broker starts a process that may serve the model. A
// process with an attached worker does not count.
func isStarting(s *stats.Broker, model string) bool {
	serves := []string{"", model} // "": the configuration names no model
	if m := s.Model(model); m != nil {
		serves = append(serves, m.Stages...)
	}
	return slices.ContainsFunc(s.Processes, func(p stats.Process) bool {
		starts := !p.Client && p.Sessions == 0 && p.State != "stopped"
		return starts && p.FailedStarts < DeadLives && slices.Contains(serves, p.Model)
	})
}
