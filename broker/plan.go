// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker/engine"
	"github.com/ringbatch/ringbatch/internal/cgroup"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// plan is a checked model: its memory, and its stages.
type plan struct {
	layout   *shm.Layout // as clients see it
	settings policy.Settings
	stages   []stagePlan
}

type stagePlan struct {
	cfg      ModelConfig // of a model without other stages
	settings policy.Settings
	layout   *shm.Layout // as its workers see it
	dims     []int       // the places of its inputs' sizes among those of a commit
}

// plan checks a model, and plans its memory and stages.
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
	if p.settings.Slots == 0 { // the broker chooses
		if p.layout, err = m.newLayout(1, most); err != nil {
			return p, err
		}
		n := int(min(DefaultSlots, defaultRingBytes()/max(1, p.layout.SlotBytes())))
		p.settings.Slots = min(max(n, minBatches*most), shm.MaxSlots)
	}
	if p.settings.Slots < most {
		return p, fmt.Errorf("%w: %d slots cannot hold a batch of %d", status.ErrInvalid, p.settings.Slots, most)
	}
	if p.layout, err = m.newLayout(p.settings.Slots, most); err != nil {
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

// newLayout lays out the ring: of a pipeline, its inputs and each stage's outputs.
func (m *ModelConfig) newLayout(slots, most int) (*shm.Layout, error) {
	if len(m.Stages) == 0 {
		return shm.NewLayout(m.Signature, slots, most)
	}
	planes := slices.Clone(m.Signature.Inputs)
	for i := range m.Stages {
		planes = append(planes, m.Stages[i].Signature.Outputs...)
	}
	planes = append(planes, shm.StatePlanes(m.Signature.State)...)
	return shm.NewPipelineLayout(planes, m.Signature, slots, most)
}

// sizesOf is the places of some inputs' variable dimensions among those of all inputs.
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

// checkRing refuses a ring that is larger than the machine's memory, or than the room of
// the broker's memory cgroup. The cgroup of the process that touches a page first, mostly
// a client, pays for it; with a limit, that is usually the same container.
func checkRing(name string, layout *shm.Layout) error {
	bytes, total := layout.PlanesSize+layout.BoardSize, memTotal()
	err := shm.CheckRoom(bytes)
	if total > 0 && bytes > total {
		err = fmt.Errorf("%w: the ring would take %d MiB, this machine has %d MiB", status.ErrNoMemory, bytes>>20, total>>20)
	}
	if err != nil {
		return fmt.Errorf("model %q: %w; lower its slots (now %d of %d bytes)", name, err, layout.Slots, layout.SlotBytes())
	}
	return nil
}

// defaultRingBytes bounds a ring by half of a memory cgroup's room, too.
func defaultRingBytes() int64 {
	if room, limited := cgroup.Tightest(); limited {
		return min(DefaultRingBytes, room.Left/2)
	}
	return DefaultRingBytes
}

// memTotal is this machine's memory, 0 if unknown.
func memTotal() int64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return int64(info.Totalram) * int64(info.Unit)
}
