package broker

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/status"
)

// SettableKeys are the parts of a model's policy that can change while it
// runs.
var SettableKeys = []string{"wait_time", "max_batch_size", "preferred_batch_sizes", "max_queue", "default_timeout", "max_timeout", "on_timeout", "ageing", "lease"}

// set changes a model's policy, whole or not at all.
func (b *Broker) set(name string, pairs map[string]string) error {
	m, err := b.models.take(name)
	if err != nil {
		return err
	}
	defer b.models.leave(m)
	if !m.do(func() { err = m.stage.set(pairs) }) {
		return status.ErrDraining
	}
	return err
}

func (s *stage) set(pairs map[string]string) error {
	next := s.cfg
	next.Policy.Levels = slices.Clone(next.Policy.Levels)
	for key, value := range pairs {
		if err := next.setKey(key, value); err != nil {
			return err
		}
	}
	return s.reconfigure(next)
}

// reconfigure takes a new policy into force, or refuses it.
func (s *stage) reconfigure(next ModelConfig) error {
	if most := s.ring.layout.MaxBatch; next.Policy.MaxBatchSize > most {
		return fmt.Errorf("%w: max_batch_size is %d, the ring was made for %d", status.ErrInvalid, next.Policy.MaxBatchSize, most)
	}
	if next.Lease <= 0 {
		return fmt.Errorf("%w: lease is %v, must be positive", status.ErrInvalid, next.Lease)
	}
	if err := s.apply(next.Policy); err != nil {
		return fmt.Errorf("%w: %w", status.ErrInvalid, err)
	}
	s.cfg = next
	s.leaseEnd = s.loop.now // to be looked at anew
	s.log.Info("policy changed", "max_batch_size", next.Policy.MaxBatchSize, "wait_time", next.Policy.WaitTime,
		"preferred_batch_sizes", next.Policy.PreferredSizes, "lease", next.Lease)
	return nil
}

// setKey changes one value; "max_queue.2" means that of level 2.
func (m *ModelConfig) setKey(key, value string) error {
	bad := func(why string) error { return fmt.Errorf("%w: %s=%s: %s", status.ErrInvalid, key, value, why) }
	base, level, hasLevel := strings.Cut(key, ".")
	var lp *batcher.LevelPolicy
	switch base {
	case "max_queue", "default_timeout", "max_timeout", "on_timeout":
		if len(m.Policy.Levels) == 0 {
			m.Policy.Levels = make([]batcher.LevelPolicy, 1)
		}
		n := m.Policy.DefaultLevel
		if hasLevel {
			var err error
			if n, err = strconv.Atoi(level); err != nil || n < 0 || n >= len(m.Policy.Levels) {
				return bad(fmt.Sprintf("no such priority level, the model has 0..%d", len(m.Policy.Levels)-1))
			}
		}
		lp = &m.Policy.Levels[n]
	default:
		if hasLevel {
			return bad("this key has no levels")
		}
	}
	var err error
	switch base {
	case "wait_time":
		m.Policy.WaitTime, err = ParseDuration(value)
	case "max_batch_size":
		m.Policy.MaxBatchSize, err = strconv.Atoi(value)
	case "preferred_batch_sizes":
		m.Policy.PreferredSizes, err = parseInts(value)
	case "ageing":
		m.Policy.Ageing, err = ParseDuration(value)
	case "lease":
		m.Lease, err = ParseDuration(value)
	case "max_queue":
		lp.MaxQueue, err = strconv.Atoi(value)
	case "default_timeout":
		lp.DefaultTimeout, err = ParseDuration(value)
	case "max_timeout":
		lp.MaxTimeout, err = ParseDuration(value)
	case "on_timeout":
		lp.OnTimeout, err = ParseAction(value)
	default:
		return bad("not a key that can change while the model runs; these can: " + strings.Join(SettableKeys, ", "))
	}
	if err != nil {
		return bad(err.Error())
	}
	return nil
}

// ParseDuration reads 5ms, 0.005 (seconds) or 0.
func ParseDuration(s string) (time.Duration, error) {
	if f, err := strconv.ParseFloat(s, 64); err == nil {
		if !(f >= 0 && f <= 1e9) { // so that NaN is out of range too
			return 0, fmt.Errorf("duration %q is out of range", s)
		}
		return time.Duration(f * float64(time.Second)), nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a duration: write 5ms, 1.5s, or seconds as a number", s)
	}
	return d, nil
}

func parseInts(s string) ([]int, error) {
	if strings.Trim(s, "[] ") == "" {
		return nil, nil
	}
	var list []int
	for _, f := range strings.Split(strings.Trim(s, "[] "), ",") {
		n, err := strconv.Atoi(strings.TrimSpace(f))
		if err != nil {
			return nil, fmt.Errorf("%q is not a number", f)
		}
		list = append(list, n)
	}
	return list, nil
}

// ParseAction reads what happens to a request that waited for too long.
func ParseAction(s string) (batcher.TimeoutAction, error) {
	switch s {
	case "reject":
		return batcher.Reject, nil
	case "delay":
		return batcher.Delay, nil
	}
	return 0, fmt.Errorf("must be reject or delay")
}
