// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/broker/staffing"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
)

// The memory of workers on GPUs with a budget: declared, or measured while they serve. Until
// it is measured for the first time a model has its GPUs alone, besides models that stay:
// their memory is declared.

// Times of measuring, since a model is awake: first after the least pause, then whenever that
// time has doubled, then after each longest pause. Workers take more memory as they serve.
const (
	leastMeasurePause   = time.Second
	longestMeasurePause = time.Minute
)

// needs is the memory that processes of a declaration take on each GPU.
func needs(w *supervise.Worker, instances int) staffing.Bytes {
	b := staffing.Bytes{}
	for i := range instances + w.Spares {
		if w.Memory > 0 {
			b[w.GPUs[i%len(w.GPUs)]] += w.Memory
		}
	}
	return b
}

// setGroups takes a model's declarations. What was measured under earlier ones stays.
func (s *staff) setGroups(x *staffed, groups []supervise.Group) {
	before := x.taken
	x.groups, x.taken, x.measureAt = slices.Clone(groups), map[[2]int]int64{}, 0
	for i := range x.groups {
		g := &x.groups[i]
		g.Workers = slices.Clone(g.Workers)
		for k := range g.Workers {
			if w, at := &g.Workers[k], [2]int{i, k}; s.isUnknown(w) {
				w.Memory = before[at]
				x.taken[at] = w.Memory
			}
		}
	}
}

// growth is the memory that a model's workers would take under other declarations, as far as
// it is known, and how much more they would hold.
func (s *staff) growth(x *staffed, groups []supervise.Group) (all, more staffing.Bytes) {
	before, was, taken := s.needs(x), x.groups, x.taken
	s.setGroups(x, x.fit(groups))
	all, more = s.bound(x.known()), s.needs(x)
	x.groups, x.taken = was, taken
	for gpu := range more {
		more[gpu] = max(0, more[gpu]-before[gpu])
	}
	return all, more
}

// checkReload refuses declarations that would take room that is not free. A model that sleeps
// gets its room when it wakes.
func (s *staff) checkReload(models []ModelConfig, always []supervise.Worker) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, all := s.growth(s.always, []supervise.Group{{Workers: always}})
	for _, x := range s.list {
		at := slices.IndexFunc(models, func(mc ModelConfig) bool { return mc.Name == x.m.name })
		if at < 0 || x.state == staffing.Asleep {
			continue
		}
		_, more := s.growth(x, models[at].workerGroups())
		for gpu, bytes := range more {
			all[gpu] += bytes
		}
	}
	return s.checkFree(all)
}

func (s *staff) checkFree(more staffing.Bytes) error {
	if staffing.Fits(s.budgets(), more, s.tenants()) {
		return nil
	}
	maps.DeleteFunc(more, func(gpu int, bytes int64) bool { return bytes == 0 })
	return fmt.Errorf("%w: more workers would take more than is free of GPU %s; end others first, as with `ringbatch sleep`",
		status.ErrInvalid, strings.Trim(fmt.Sprint(slices.Sorted(maps.Keys(more))), "[]"))
}

// scale changes the instances of a model's or stage's workers, if there is room.
func (s *staff) scale(ctx context.Context, m *model, group string, instances int) error {
	x, err := s.noteScale(m, group, instances)
	if err != nil {
		return err
	}
	defer s.settle(x)
	return s.super.Scale(ctx, group, instances) // refuses bad numbers
}

// noteScale returns a model whose instances change.
func (s *staff) noteScale(m *model, group string, instances int) (changed *staffed, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.find(m)
	if x == nil || instances < 1 {
		return nil, nil
	}
	groups := slices.Clone(x.groups)
	at := slices.Index(x.names(), group)
	if at < 0 || len(groups[at].Workers) != 1 || groups[at].Workers[0].Most > 0 {
		return nil, nil
	}
	w := groups[at].Workers[0]
	if w.Instances = instances; w.Fill() != nil {
		return nil, nil
	}
	groups[at].Workers = []supervise.Worker{w}
	all, more := s.growth(x, groups)
	for gpu, bytes := range all {
		if room := s.roomOf(gpu); bytes > room && !x.stays() {
			return nil, fmt.Errorf("%w: %d instances take %d MiB of GPU %d, whose budget leaves %d MiB beside workers that always run",
				status.ErrInvalid, instances, bytes>>20, gpu, room>>20)
		}
	}
	if x.state != staffing.Asleep || x.stays() {
		if err := s.checkFree(more); err != nil {
			return nil, err
		}
	}
	s.hold(x)
	x.groups = groups
	return x, nil
}

// isUnknown says that a worker's memory counts, and has been neither declared nor measured.
func (s *staff) isUnknown(w *supervise.Worker) bool {
	return w.Memory == 0 && slices.ContainsFunc(w.GPUs, func(gpu int) bool { _, bound := s.cfg.GPUMemory[gpu]; return bound })
}

// budgets is what the workers of no model leave of the GPUs.
func (s *staff) budgets() staffing.Bytes {
	b := staffing.Bytes{}
	maps.Copy(b, s.cfg.GPUMemory)
	for gpu, bytes := range s.bound(s.always.known()) {
		b[gpu] -= bytes
	}
	return b
}

// needs is the memory that a model's workers take of GPUs with a budget.
func (s *staff) needs(x *staffed) staffing.Bytes {
	all := x.known()
	for i := range x.groups {
		for k := range x.groups[i].Workers {
			if w := &x.groups[i].Workers[k]; s.isUnknown(w) {
				for _, gpu := range w.GPUs {
					all[gpu] = s.budgets()[gpu]
				}
			}
		}
	}
	s.bound(all)
	for gpu := range all {
		if len(x.taken) > 0 {
			all[gpu] = min(all[gpu], s.roomOf(gpu))
		}
	}
	return all
}

// known is the memory of a model's workers, as far as it is known. During a change it is the
// larger of before and after.
func (x *staffed) known() staffing.Bytes {
	all := staffing.Bytes{}
	for i := range x.groups {
		for k := range x.groups[i].Workers {
			w := &x.groups[i].Workers[k]
			for gpu, bytes := range needs(w, w.Instances) {
				all[gpu] += bytes
			}
		}
	}
	for gpu, bytes := range x.held {
		all[gpu] = max(all[gpu], bytes)
	}
	return all
}

// roomOf is what models that stay leave of a GPU. They declare their memory.
func (s *staff) roomOf(gpu int) int64 {
	room := s.budgets()[gpu]
	for _, y := range s.list {
		if y.stays() {
			room -= y.known()[gpu]
		}
	}
	return room
}

// measureInTime measures a model that is awake, if that is due, and returns when it is due again.
func (s *staff) measureInTime(x *staffed, now staffing.Time) (pause time.Duration) {
	age := now - x.since
	if now >= x.measureAt {
		x.measureAt = now + min(max(age, leastMeasurePause), longestMeasurePause)
		if age >= leastMeasurePause && !x.measuring { // a driver that hangs holds nvidia-smi for ever
			x.measuring = true
			go s.measure(x)
		}
	}
	return x.measureAt - now
}

func (s *staff) measure(x *staffed) {
	s.mu.Lock()
	names := x.names()
	s.mu.Unlock()
	for i, name := range names {
		by, err := s.super.MeasureMemory(s.closing, name)
		s.mu.Lock()
		switch {
		case x.state != staffing.Awake: // its processes end
		case err == nil:
			s.noteMemory(x, i, by)
		case !x.warned:
			x.warned = true
			s.log.Warn("GPU memory of workers cannot be measured; declare it, as in memory = \"6GiB\": until then the model has its GPUs alone",
				"model", name, "why", err)
		}
		s.mu.Unlock()
	}
	s.mu.Lock()
	x.measuring = false
	s.mu.Unlock()
	s.wantLook()
}

// noteMemory takes what the processes of a group's declarations take. The most ever counts.
func (s *staff) noteMemory(x *staffed, group int, by map[int]int64) {
	for k, bytes := range by {
		at := [2]int{group, k}
		if before, measured := x.taken[at]; measured && bytes > before {
			x.taken[at], x.groups[group].Workers[k].Memory = bytes, bytes
			s.log.Info("GPU memory of a worker measured", "model", x.groups[group].Model, "mib", bytes>>20)
		}
	}
	for gpu, bytes := range s.bound(x.known()) {
		if room := s.roomOf(gpu); bytes > room && !x.warned {
			x.warned = true
			s.log.Warn("workers take more memory of a GPU than its budget leaves", "model", x.m.name, "gpu", gpu, "mib", bytes>>20, "room_mib", room>>20)
		}
	}
}
