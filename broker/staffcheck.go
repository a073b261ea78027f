// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/broker/staffing"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/status"
)

// checkStaffing refuses a configuration whose rules of sleep and room contradict each other.
func checkStaffing(cfg *Config) error {
	kept := staffing.Bytes{}
	for i := range cfg.Workers {
		w := &cfg.Workers[i]
		if w.Most > 0 {
			return fmt.Errorf("%w: instances from %d to %d: only the workers of a [[model]] can follow its load", status.ErrInvalid, w.Least, w.Most)
		}
		if err := cfg.checkWorker(w, kept, true); err != nil {
			return err
		}
	}
	all := make([]staffing.Bytes, len(cfg.Models))
	for i := range cfg.Models {
		mc := &cfg.Models[i]
		var err error
		if all[i], err = mc.checkStaffing(cfg); err != nil {
			return fmt.Errorf("model %q: %w", mc.Name, err)
		}
		for gpu, bytes := range all[i] {
			if mc.stays() {
				kept[gpu] += bytes
			}
		}
	}
	for gpu, budget := range cfg.GPUMemory {
		if kept[gpu] > budget {
			return fmt.Errorf("%w: the workers that always run take %d MiB of GPU %d, its budget is %d MiB", status.ErrInvalid,
				kept[gpu]>>20, gpu, budget>>20)
		}
		for i := range cfg.Models {
			if mc := &cfg.Models[i]; !mc.stays() && all[i][gpu] > budget-kept[gpu] {
				return fmt.Errorf("%w: model %q: its workers take %d MiB of GPU %d, whose budget leaves %d MiB beside workers that always run",
					status.ErrInvalid, mc.Name, all[i][gpu]>>20, gpu, (budget-kept[gpu])>>20)
			}
		}
	}
	return nil
}

// stays says that the model does not sleep for others.
func (mc *ModelConfig) stays() bool { return mc.Keep || mc.onDevice() }

// checkStaffing returns the memory with which the model starts.
func (mc *ModelConfig) checkStaffing(cfg *Config) (all staffing.Bytes, err error) {
	workers := 0
	all = staffing.Bytes{}
	for _, g := range mc.workerGroups() {
		for i := range g.Workers {
			w := &g.Workers[i]
			workers++
			if w.Most > 0 && len(g.Workers) > 1 {
				return nil, fmt.Errorf("%w: instances from %d to %d: a model with several kinds of workers cannot follow its load",
					status.ErrInvalid, w.Least, w.Most)
			}
			if w.Most > 0 && w.Least == 0 && mc.Idle == 0 {
				return nil, fmt.Errorf("%w: instances from 0: say after what time without a request the last worker ends, as in idle = \"10m\"", status.ErrInvalid)
			}
			if err := cfg.checkWorker(w, all, mc.stays()); err != nil {
				return nil, err
			}
		}
	}
	switch {
	case mc.Idle != 0 && mc.Idle < time.Second:
		return nil, fmt.Errorf("%w: idle is %v, must be 1s or more", status.ErrInvalid, mc.Idle)
	case mc.Idle > 0 && mc.Keep:
		return nil, fmt.Errorf("%w: idle = \"%v\" and keep = true contradict each other: a model that is kept never sleeps", status.ErrInvalid, mc.Idle)
	case mc.Idle > 0 && workers == 0:
		return nil, fmt.Errorf("%w: idle: the broker starts no workers of this model; declare them, as [[model.worker]]", status.ErrInvalid)
	case mc.Idle > 0 && mc.onDevice():
		return nil, fmt.Errorf("%w: idle: the model has tensors in device memory, which its workers hold; it cannot sleep", status.ErrInvalid)
	}
	return all, nil
}

func (mc *ModelConfig) onDevice() bool {
	return mc.Signature.FirstOnDevice() != nil || slices.ContainsFunc(mc.Stages, func(s StageConfig) bool { return s.Signature.FirstOnDevice() != nil })
}

// checkWorker adds what a worker needs, with which instances it starts.
func (cfg *Config) checkWorker(w *supervise.Worker, all staffing.Bytes, stays bool) error {
	for _, gpu := range w.GPUs {
		if _, bound := cfg.GPUMemory[gpu]; bound && w.Memory == 0 && !w.Client && stays {
			return fmt.Errorf("%w: GPU %d has a budget: say how much memory a process of %q takes, which always runs, as in memory = \"6GiB\"",
				status.ErrInvalid, gpu, strings.Join(w.Command, " "))
		}
	}
	n := max(1, w.Instances)
	if w.Most > 0 {
		n = max(1, w.Least)
	}
	for gpu, bytes := range needs(w, n) {
		all[gpu] += bytes
	}
	return nil
}
