// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"slices"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// plan is a model that could be made: its memory, and its stages.
type plan struct {
	layout   *shm.Layout // as clients see it
	settings policy.Settings
	stages   []stagePlan
}

type stagePlan struct {
	cfg      ModelConfig // as if it were a model of its own
	settings policy.Settings
	layout   *shm.Layout // as its workers see it
	dims     []int       // which of the sizes of a commit its inputs have
}

// plan checks a model of any kind.
func (m *ModelConfig) plan() (p plan, err error) {
	if !tensor.ValidName(m.Name) {
		return p, fmt.Errorf("%w: name must be 1..%d bytes, printable, without blanks", status.ErrInvalid, tensor.MaxNameBytes)
	}
	if err := m.Signature.Validate(); err != nil {
		return p, err
	}
	if p.settings, err = m.Policy.Resolve(m.Signature.Inputs); err != nil {
		return p, err
	}
	if len(m.Stages) == 0 {
		p.stages = []stagePlan{{cfg: *m, settings: p.settings}}
	} else if p.stages, err = m.planStages(&p.settings); err != nil {
		return p, err
	}
	most := 0
	for i := range p.stages {
		for k := range p.stages[i].cfg.Workers {
			if err := p.stages[i].cfg.Workers[k].Fill(); err != nil {
				return p, err
			}
		}
		most = max(most, p.stages[i].settings.MaxBatchSize)
	}
	if p.settings.Slots == 0 { // nobody asked for a number
		if p.layout, err = m.lay(1, most); err != nil {
			return p, err
		}
		n := int(min(DefaultSlots, defaultRingBytes()/max(1, p.layout.SlotBytes())))
		p.settings.Slots = min(max(n, minBatches*most), shm.MaxSlots)
	}
	if p.settings.Slots < most {
		return p, fmt.Errorf("%w: %d slots cannot hold a batch of %d", status.ErrInvalid, p.settings.Slots, most)
	}
	if p.layout, err = m.lay(p.settings.Slots, most); err != nil {
		return p, err
	}
	if err := engine.CheckPrivate(&p.settings, p.layout.DeviceSize); err != nil {
		return p, err
	}
	for i := range p.stages {
		s := &p.stages[i]
		s.settings.Slots = p.settings.Slots
		if s.layout, err = p.layout.View(s.cfg.Signature); err != nil {
			return p, err
		}
		s.dims = sizesOf(m.Signature.Inputs, s.cfg.Signature.Inputs)
	}
	return p, nil
}

// lay is the memory of the model. That of a pipeline begins with its inputs,
// and goes on with what each stage writes.
func (m *ModelConfig) lay(slots, most int) (*shm.Layout, error) {
	if len(m.Stages) == 0 {
		return shm.NewLayout(m.Signature, slots, most)
	}
	planes := slices.Clone(m.Signature.Inputs)
	for i := range m.Stages {
		planes = append(planes, m.Stages[i].Signature.Outputs...)
	}
	return shm.NewPipelineLayout(planes, m.Signature, slots, most)
}

// sizesOf says where the variable dimensions of some inputs are among those of
// all.
func sizesOf(all, some []tensor.Spec) (at []int) {
	for _, t := range some {
		n := 0
		for _, from := range all {
			for range from.Variable {
				if from.Name == t.Name {
					at = append(at, n)
				}
				n++
			}
		}
	}
	return at
}
