package batcher

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Limits of a Config. They bound memory, not policy: a batch larger than
// MaxRows or a model with more levels than MaxLevels is a typing error.
const (
	MaxRows      = 1 << 20
	MaxLevels    = 63 // one bit of a word per level, and one for delayed requests
	MaxPreferred = 1 << 10
	MaxBuckets   = 1 << 12 // per variable dimension
	MaxDuration  = 24 * time.Hour
)

// Errors of New and SetConfig wrap ErrConfig and name the field and its limit.
var ErrConfig = errors.New("batching policy refused")

func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrConfig, fmt.Sprintf(format, args...))
}

// Validate reports the first field that is out of its range.
func (c *Config) Validate() error {
	if c.MaxBatchSize < 1 || c.MaxBatchSize > MaxRows {
		return refuse("max_batch_size is %d, must be 1..%d", c.MaxBatchSize, MaxRows)
	}
	if err := checkDuration("wait_time", c.WaitTime); err != nil {
		return err
	}
	if err := checkDuration("ageing", c.Ageing); err != nil {
		return err
	}
	if err := c.validatePreferred(); err != nil {
		return err
	}
	if err := c.validateLevels(); err != nil {
		return err
	}
	return c.validateBuckets()
}

func (c *Config) validatePreferred() error {
	if len(c.PreferredSizes) > MaxPreferred {
		return refuse("preferred_batch_sizes has %d entries, at most %d", len(c.PreferredSizes), MaxPreferred)
	}
	last := 0
	for i, size := range c.PreferredSizes {
		if size <= last {
			return refuse("preferred_batch_sizes[%d] is %d, must be ascending and at least 1", i, size)
		}
		if size > c.MaxBatchSize {
			return refuse("preferred_batch_sizes[%d] is %d, more than max_batch_size %d", i, size, c.MaxBatchSize)
		}
		last = size
	}
	return nil
}

func (c *Config) validateLevels() error {
	if len(c.Levels) > MaxLevels {
		return refuse("priority has %d levels, at most %d", len(c.Levels), MaxLevels)
	}
	if c.DefaultLevel < 0 || c.DefaultLevel >= c.levelCount() {
		return refuse("default_priority is %d, must be 0..%d", c.DefaultLevel, c.levelCount()-1)
	}
	for i, l := range c.Levels {
		if l.MaxQueue < 0 {
			return refuse("priority[%d].max_queue is %d, must be at least 0 (0: no limit)", i, l.MaxQueue)
		}
		if err := checkDuration(fmt.Sprintf("priority[%d].default_timeout", i), l.DefaultTimeout); err != nil {
			return err
		}
		if err := checkDuration(fmt.Sprintf("priority[%d].max_timeout", i), l.MaxTimeout); err != nil {
			return err
		}
		if l.OnTimeout > Delay {
			return refuse("priority[%d].on_timeout is %d, must be reject or delay", i, l.OnTimeout)
		}
	}
	return nil
}

func (c *Config) validateBuckets() error {
	if len(c.Buckets) > MaxVariableDims {
		return refuse("buckets has %d dimensions, at most %d", len(c.Buckets), MaxVariableDims)
	}
	for i, sizes := range c.Buckets {
		if len(sizes) > MaxBuckets {
			return refuse("buckets[%d] has %d entries, at most %d", i, len(sizes), MaxBuckets)
		}
		last := uint32(0)
		for j, size := range sizes {
			if size <= last {
				return refuse("buckets[%d][%d] is %d, must be ascending and at least 1", i, j, size)
			}
			last = size
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

func (c *Config) levelCount() int { return max(1, len(c.Levels)) }

func (c *Config) level(i int) LevelPolicy {
	if i < len(c.Levels) {
		return c.Levels[i]
	}
	return LevelPolicy{}
}

// Deadline is the deadline that a request of a level has, for as long as it
// waits and runs: its own, or sooner if the level does not allow as much time.
func (c *Config) Deadline(level int, arrived, own Time) Time {
	if level == DefaultLevel {
		level = c.DefaultLevel
	}
	if level >= 0 && c.level(level).MaxTimeout > 0 {
		own = min(own, arrived+Time(c.level(level).MaxTimeout))
	}
	return own
}

// bucket rounds d up to the declared bucket sizes.
func (c *Config) bucket(d Dims) (Dims, error) {
	for i, sizes := range c.Buckets {
		if len(sizes) == 0 {
			continue
		}
		j, _ := slices.BinarySearch(sizes, d[i])
		if j == len(sizes) {
			return d, ErrTooLong
		}
		d[i] = sizes[j]
	}
	return d, nil
}

// padTo is the number of rows w should see for a batch of rows rows.
func (c *Config) padTo(w *Worker, rows int) int {
	switch w.Pad {
	case PadFixed:
		return max(w.PadTo, rows)
	case PadPreferred:
		i, _ := slices.BinarySearch(c.PreferredSizes, rows)
		if i < len(c.PreferredSizes) {
			return c.PreferredSizes[i]
		}
		return c.MaxBatchSize
	}
	return rows
}

// clone copies c and its slices, so that neither side sees later changes.
func (c Config) clone() Config {
	c.PreferredSizes = slices.Clone(c.PreferredSizes)
	c.Levels = slices.Clone(c.Levels)
	c.Buckets = slices.Clone(c.Buckets)
	for i := range c.Buckets {
		c.Buckets[i] = slices.Clone(c.Buckets[i])
	}
	return c
}
