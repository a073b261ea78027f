// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/staffing"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/status"
)

// command answers OpSleep and OpWake, when it is done.
func (s *staff) command(name string, awake bool) error {
	list := s.models.listModels()
	at := slices.IndexFunc(list, func(m *model) bool { return m.name == name })
	if at < 0 {
		m, _, err := s.models.takeStage(name)
		if err == nil {
			s.models.leaveModel(m)
			err = fmt.Errorf("%w: %q is a stage; name the pipeline %q", status.ErrInvalid, name, m.name)
		}
		return err
	}
	m := list[at]
	ctx, cancel := context.WithTimeout(s.closing, control.ChangeTime)
	defer cancel()
	if err := s.begin(m, awake); err != nil {
		return err
	}
	for {
		changed := s.models.changes.changedSince(s.models.changes.current())
		if done, err := s.isDone(m, awake); done || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-time.After(lookTime):
		case <-ctx.Done():
			return fmt.Errorf("%w: %q is not there yet", status.ErrTimeout, name)
		}
	}
}

func (s *staff) begin(m *model, awake bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.find(m)
	switch {
	case x == nil:
		return errNoStaff(m)
	case awake && x.state != staffing.Awake:
		x.failed, x.byHand = "", true
		s.informRing(x)
		x.asked.Store(true)
		s.wantLook()
		return nil
	case awake || x.state == staffing.Ending:
		return nil
	case x.state == staffing.Asleep:
		x.byHand = false // it waits for room no longer, unless requests do
		return nil
	case x.keep:
		return fmt.Errorf("%w: %q has keep = true in the configuration, so it does not sleep", status.ErrInvalid, m.name)
	case m.layout.DeviceSize > 0:
		return fmt.Errorf("%w: %q has tensors in device memory, which its workers hold; it cannot sleep", status.ErrInvalid, m.name)
	}
	if x.observe(s.clock()); x.busy {
		return fmt.Errorf("%w: %q has requests; it can sleep when they have ended", status.ErrInvalid, m.name)
	}
	s.sleep(x, s.clock(), "by hand")
	return nil
}

func errNoStaff(m *model) error {
	return fmt.Errorf("%w: the broker starts no workers of %q; only those that it starts can sleep and wake", status.ErrInvalid, m.name)
}

func (s *staff) isDone(m *model, awake bool) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.find(m)
	switch {
	case x == nil: // a reload has removed them
		return false, errNoStaff(m)
	case !awake:
		return x.state != staffing.Ending, nil
	case x.state == staffing.Awake:
		return true, nil
	case x.failed != "":
		return false, fmt.Errorf("%w: %q does not wake: %s", status.ErrNoWorker, m.name, x.failed)
	case x.state != staffing.Waking && !x.byHand:
		return false, fmt.Errorf("%w: %q was put to sleep again", status.ErrCanceled, m.name)
	}
	return false, nil
}

// snapshot is the state of each model of which the broker starts the workers, at one moment.
func (s *staff) snapshot() map[*model]*stats.Staffing {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[*model]*stats.Staffing, len(s.list))
	for _, x := range s.list {
		all[x.m] = s.snapshotOf(x)
	}
	return all
}

func (s *staff) snapshotOf(x *staffed) *stats.Staffing {
	out := &stats.Staffing{
		State: x.state.String(), SinceS: (s.clock() - x.since).Seconds(), Why: x.why, Failed: x.failed, IdleS: x.idle.Seconds(), Keep: x.keep,
		Wakes: x.wakes, Sleeps: x.sleeps, FailedWakes: x.failures, WakeMS: ms(x.took), LongestWakeMS: ms(x.longest),
	}
	if x.waits && x.holder != "" {
		out.Why = "waits for room: " + x.holder
	}
	memory := x.known()
	maps.Copy(memory, s.needs(x))
	for gpu, bytes := range memory {
		out.Memory = append(out.Memory, stats.GPUMemory{GPU: gpu, Bytes: bytes, Held: x.state != staffing.Asleep})
	}
	for i := range x.groups {
		if w := x.groups[i].Workers; len(w) > 0 && w[0].Most > 0 {
			out.Least, out.Most, out.Instances = out.Least+w[0].Least, out.Most+w[0].Most, out.Instances+w[0].Instances
		}
	}
	return out
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
