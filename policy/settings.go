// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Settings are a policy in force: a value for every key. The zero value of each field but
// MaxBatchSize is the simple case: no waiting, one level, no preferred sizes.
type Settings struct {
	MaxBatchSize int           // rows
	MaxBatchCost int           // of all rows of a batch; 0: no limit
	Cost         int           // the variable dimension, over all inputs, that a row costs by default
	WaitTime     time.Duration // how long the oldest request waits for others; Auto: as long as it pays
	// LatencyGoal, if positive, bounds p99. Batches are filled as far as it allows, and
	// requests that would take longer are refused.
	LatencyGoal time.Duration
	// PreferredBatchSizes are row counts, ascending, ≤ MaxBatchSize. A batch goes out as
	// soon as it fills the largest ready size exactly; else it waits for the wait time.
	PreferredBatchSizes []int
	Levels              []Level // one per priority level; none means one without limits
	DefaultPriority     int     // the level of requests that name none
	// Ageing, if positive, lifts a waiting request by one level after each such time.
	Ageing time.Duration
	// Buckets[i], if not empty, lists ascending sizes. The i-th variable dimension of the
	// inputs is rounded up to one of them when requests are grouped.
	Buckets [][]uint32
	// PreserveOrder keeps each client's requests in commit order. They run in at most one
	// batch at a time, and never overtake each other, whatever their level and shape.
	PreserveOrder bool
	Slots         int           // rows of the ring; 0: the broker chooses
	MaxWindow     int           // the most slots of one client; 0: the broker chooses
	Private       bool          // slots are cleared before they change owner
	Lease         time.Duration // how long a batch may run before its worker counts as hung
	MaxAttempts   int           // workers that may die of a request before it fails
	Ragged        bool          // requests of different sizes share a batch
	NoWorker      NoWorkerAction
}

// Level is the queue policy of one priority level.
type Level struct {
	MaxQueue       int           // requests waiting at this level; 0 = no limit
	DefaultTimeout time.Duration // queue time after which OnTimeout applies; 0 = none
	MaxTimeout     time.Duration // upper limit for a request's own time budget (Deadline-Arrived); 0 = none
	OnTimeout      Action
}

// Action is the treatment of a request that waited for longer than its level's timeout.
type Action uint8

const (
	Reject Action = iota // the request ends with QueueTimeout
	Delay                // the request runs after all that have not timed out
)

func (a Action) String() string {
	if a == Delay {
		return "delay"
	}
	return "reject"
}

// Auto as Settings.WaitTime lets the batcher learn the best wait.
const Auto time.Duration = -1

// NoWorkerAction is the treatment of a request whose model has no worker.
type NoWorkerAction uint8

const (
	WaitForWorker       NoWorkerAction = iota // the request waits, until its deadline if it has one
	RefuseWithoutWorker                       // the request ends with NoWorker at once
)

func (a NoWorkerAction) String() string {
	if a == RefuseWithoutWorker {
		return "refuse"
	}
	return "wait"
}

// Limits of settings. They bound memory, not policy: a batch larger than
// MaxRows or a model with more levels than MaxLevels is a typing error.
const (
	MaxRows      = 1 << 20
	MaxCost      = 1<<31 - 1
	MaxLevels    = 63 // one bit of a word per level, and one for delayed requests
	MaxPreferred = 1 << 10
	MaxBuckets   = 1 << 12 // per variable dimension
	MaxDuration  = 24 * time.Hour
	MinLease     = 100 * time.Millisecond // longer than a worker may wait for a core
)

// LevelCount is at least 1.
func (s *Settings) LevelCount() int { return max(1, len(s.Levels)) }

// Level is the queue policy of one level.
func (s *Settings) Level(i int) Level {
	if i < len(s.Levels) {
		return s.Levels[i]
	}
	return Level{}
}

// Clone copies s and its slices.
func (s *Settings) Clone() Settings {
	c := *s
	c.PreferredBatchSizes = slices.Clone(c.PreferredBatchSizes)
	c.Levels = slices.Clone(c.Levels)
	c.Buckets = slices.Clone(c.Buckets)
	for i := range c.Buckets {
		c.Buckets[i] = slices.Clone(c.Buckets[i])
	}
	return c
}

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", status.ErrInvalid, fmt.Sprintf(format, args...))
}

// Validate reports the first setting that is out of its range, or does not fit the others.
func (s *Settings) Validate() error {
	if s.MaxBatchSize < 1 || s.MaxBatchSize > MaxRows {
		return refuse("max_batch_size is %d, must be 1..%d", s.MaxBatchSize, MaxRows)
	}
	if s.MaxBatchCost < 0 || s.MaxBatchCost > MaxCost {
		return refuse("max_batch_cost is %d, must be 0..%d", s.MaxBatchCost, MaxCost)
	}
	if s.Cost < 0 || s.Cost >= tensor.MaxVariableDims {
		return refuse("cost is variable dimension %d, must be 0..%d", s.Cost, tensor.MaxVariableDims-1)
	}
	if n := s.LevelCount(); s.DefaultPriority < 0 || s.DefaultPriority >= n {
		return refuse("default_priority is %d, must be 0..%d", s.DefaultPriority, n-1)
	}
	if len(s.Levels) > MaxLevels {
		return refuse("%d priorities, at most %d", len(s.Levels), MaxLevels)
	}
	if s.WaitTime != Auto {
		if err := checkDuration("wait_time", s.WaitTime); err != nil {
			return err
		}
	}
	err := cmp.Or(checkDuration("latency_goal", s.LatencyGoal), checkDuration("ageing", s.Ageing), checkDuration("lease", s.Lease))
	if err != nil {
		return err
	}
	if s.LatencyGoal > 0 && s.WaitTime != Auto {
		return refuse("latency_goal chooses the wait by itself: it needs wait_time auto, not %v", s.WaitTime)
	}
	for i, l := range s.Levels {
		err := cmp.Or(checkDuration(fmt.Sprintf("default_timeout.%d", i), l.DefaultTimeout),
			checkDuration(fmt.Sprintf("max_timeout.%d", i), l.MaxTimeout))
		if err != nil {
			return err
		}
		if l.MaxQueue < 0 || l.OnTimeout > Delay {
			return refuse("max_queue.%d is %d and on_timeout.%d is %d", i, l.MaxQueue, i, uint8(l.OnTimeout))
		}
	}
	if len(s.PreferredBatchSizes) > MaxPreferred {
		return refuse("preferred_batch_sizes has %d entries, at most %d", len(s.PreferredBatchSizes), MaxPreferred)
	}
	if err := ascending("preferred_batch_sizes", s.PreferredBatchSizes, s.MaxBatchSize, "max_batch_size"); err != nil {
		return err
	}
	if len(s.Buckets) > tensor.MaxVariableDims {
		return refuse("buckets for %d dimensions, at most %d", len(s.Buckets), tensor.MaxVariableDims)
	}
	if s.Ragged && len(s.Buckets) > 0 {
		return refuse("a ragged model has no buckets: each request lies in its own sizes")
	}
	for i, sizes := range s.Buckets {
		if len(sizes) > MaxBuckets {
			return refuse("%d buckets of variable dimension %d, at most %d", len(sizes), i, MaxBuckets)
		}
		if err := ascending("buckets", sizes, 1<<32-1, "the largest size"); err != nil {
			return err
		}
	}
	return nil
}

func checkDuration(name string, d time.Duration) error {
	if d < 0 || d > MaxDuration {
		return refuse("%s is %v, must be 0..%v", name, d, MaxDuration)
	}
	return nil
}

func ascending[T int | uint32](name string, sizes []T, most T, what string) error {
	for i, size := range sizes {
		if size < 1 || i > 0 && size <= sizes[i-1] {
			return refuse("%s are %v, must ascend from 1 or more", name, sizes)
		}
		if size > most {
			return refuse("%s are %v, more than %s %d", name, sizes, what, most)
		}
	}
	return nil
}
