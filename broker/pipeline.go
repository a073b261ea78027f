// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// StageConfig declares one stage of a pipeline. Its inputs are inputs of the pipeline or
// outputs of earlier stages. Workers attach to PIPELINE/STAGE.
type StageConfig struct {
	Name      string
	Signature tensor.Signature
	Policy    policy.Policy // without a key: as the pipeline's
	Workers   []supervise.Worker
}

// MaxStages bounds the stages of a pipeline.
const MaxStages = 16

// ringKeys are the settings of the ring's memory and requests, which all stages share.
var ringKeys = []string{"slots", "max_window", "private", "ragged", "buckets", "priorities", "default_priority"}

// planStages checks how the stages follow one another, and plans each as a model.
func (m *ModelConfig) planStages(ring *policy.Settings) (stages []stagePlan, err error) {
	switch {
	case len(m.Stages) > MaxStages:
		return nil, fmt.Errorf("%w: %d stages, at most %d", status.ErrInvalid, len(m.Stages), MaxStages)
	case len(m.Workers) > 0:
		return nil, fmt.Errorf("%w: workers of a pipeline belong to its stages", status.ErrInvalid)
	}
	there := map[string]tensor.Spec{} // tensors before the stage
	for _, t := range m.Signature.Inputs {
		there[t.Name] = t
	}
	for i := range m.Stages {
		s := &m.Stages[i]
		refuse := func(format string, a ...any) ([]stagePlan, error) {
			return nil, fmt.Errorf("%w: stage %q: %s", status.ErrInvalid, s.Name, fmt.Sprintf(format, a...))
		}
		full := m.Name + "/" + s.Name
		if !tensor.ValidName(full) || s.Name == "" || strings.Contains(s.Name, "/") {
			return refuse("a stage's name has no / and no blanks, and with the pipeline's at most %d bytes", tensor.MaxNameBytes)
		}
		if slices.ContainsFunc(m.Stages[:i], func(o StageConfig) bool { return o.Name == s.Name }) {
			return refuse("there are two of this name")
		}
		if err := s.Signature.Validate(); err != nil {
			return nil, fmt.Errorf("stage %q: %w", s.Name, err)
		}
		for _, t := range s.Signature.Inputs {
			if from, ok := there[t.Name]; !ok {
				return refuse("it reads %q, which is neither an input of the pipeline nor written by a stage before it", t.Name)
			} else if from.String() != t.String() {
				return refuse("it reads %s, which is %s", t, from)
			}
		}
		last := i == len(m.Stages)-1
		for _, t := range s.Signature.Outputs {
			if _, twice := there[t.Name]; twice {
				return refuse("it writes %q, which is there before it: each tensor of a pipeline has a name of its own", t.Name)
			}
			if len(t.Variable) > 0 && !last {
				return refuse("%s has a variable dimension: only inputs of the pipeline and outputs of its last stage may; "+
					"give it its maximum size, and the true one in a tensor of its own", t)
			}
			there[t.Name] = t
		}
		if err := checkStageKeys(s.Policy); err != nil {
			return nil, fmt.Errorf("stage %q: %w", s.Name, err)
		}
		p := stagePlan{cfg: ModelConfig{Name: full, Signature: s.Signature, Policy: s.Policy.Over(m.inherited(s)), Workers: s.Workers}}
		if p.settings, err = p.cfg.Policy.Resolve(s.Signature.Inputs); err != nil {
			return nil, fmt.Errorf("stage %q: %w", s.Name, err)
		}
		if p.settings.LevelCount() != ring.LevelCount() {
			return refuse("it has %d priority levels, the pipeline %d", p.settings.LevelCount(), ring.LevelCount())
		}
		stages = append(stages, p)
	}
	return stages, m.checkOutputs(there)
}

func checkStageKeys(p policy.Policy) error {
	for key := range p {
		if name, _, _ := strings.Cut(key, "."); slices.Contains(ringKeys, name) {
			return fmt.Errorf("%w: %s is a setting of the whole pipeline, and stays as it was declared", status.ErrInvalid, name)
		}
	}
	return nil
}

func (m *ModelConfig) inherited(s *StageConfig) policy.Policy {
	p := policy.Policy{}
	for key, text := range m.Policy {
		name, _, _ := strings.Cut(key, ".")
		switch name {
		case "ragged":
			if tensor.VariableDims(s.Signature.Inputs) == 0 {
				continue
			}
		case "cost", "buckets":
			if (policy.Policy{key: text}).Check(s.Signature.Inputs) != nil {
				continue // no input of this stage has the dimension
			}
		}
		p[key] = text
	}
	return p
}

// checkOutputs checks that the stages write the pipeline's outputs. The last worker
// writes the sizes of variable outputs in the order of its outputs. So the last stage's
// outputs are outputs of the pipeline, in the same order.
func (m *ModelConfig) checkOutputs(there map[string]tensor.Spec) error {
	last := m.Stages[len(m.Stages)-1].Signature.Outputs
	for _, t := range m.Signature.Outputs {
		if from, ok := there[t.Name]; !ok || from.String() != t.String() {
			return fmt.Errorf("%w: no stage writes the output %s", status.ErrInvalid, t)
		}
		if slices.ContainsFunc(m.Signature.Inputs, func(in tensor.Spec) bool { return in.Name == t.Name }) {
			return fmt.Errorf("%w: %q is an input and an output", status.ErrInvalid, t.Name)
		}
		if len(last) > 0 && t.Name == last[0].Name {
			last = last[1:]
		}
	}
	if len(last) > 0 {
		return fmt.Errorf("%w: the last stage writes %s, which must be among the outputs, in the order of the stage's",
			status.ErrInvalid, last[0])
	}
	return nil
}

// maxPipelineBytes bounds the text of a declaration.
const maxPipelineBytes = 64 << 10

func parsePipeline(name, text string) (m ModelConfig, err error) {
	if len(text) > maxPipelineBytes {
		return m, fmt.Errorf("%w: a pipeline of %d bytes of text, at most %d", status.ErrInvalid, len(text), maxPipelineBytes)
	}
	var p control.Pipeline
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return m, fmt.Errorf("%w: pipeline: %v", status.ErrInvalid, err)
	}
	if len(p.Stages) == 0 {
		return m, fmt.Errorf("%w: a pipeline without stages", status.ErrInvalid)
	}
	m = ModelConfig{Name: name, Policy: p.Policy}
	for _, s := range p.Stages {
		m.Stages = append(m.Stages, StageConfig{Name: s.Name, Policy: s.Policy})
	}
	texts := func(i int) (inputs, outputs, state []string) {
		return p.Stages[i].Inputs, p.Stages[i].Outputs, p.Stages[i].State
	}
	return m, m.ParseTensors(p.Inputs, p.Outputs, texts)
}

// ParseTensors parses the signatures of a pipeline and its stages. An earlier tensor
// needs only its name. Without outputs the pipeline has those of its last stage.
// The pipeline's state is the states of its stages.
func (m *ModelConfig) ParseTensors(inputs, outputs []string, stage func(i int) (inputs, outputs, state []string)) (err error) {
	if m.Signature.Inputs, err = tensor.ParseSpecs(inputs, nil); err != nil {
		return err
	}
	there := slices.Clone(m.Signature.Inputs)
	for i := range m.Stages {
		s := &m.Stages[i]
		in, out, state := stage(i)
		if s.Signature.Inputs, err = tensor.ParseSpecs(in, there); err == nil {
			s.Signature.Outputs, err = tensor.ParseSpecs(out, nil)
		}
		if err == nil {
			s.Signature.State, err = tensor.ParseSpecs(state, nil)
		}
		if err != nil {
			return fmt.Errorf("stage %q: %w", s.Name, err)
		}
		there = append(there, s.Signature.Outputs...)
		m.Signature.Outputs = s.Signature.Outputs
		m.Signature.State = append(m.Signature.State, s.Signature.State...)
	}
	if len(outputs) > 0 {
		m.Signature.Outputs, err = tensor.ParseSpecs(outputs, there)
	}
	return err
}

// checkNames refuses two models or stages of one name.
func checkNames(models []ModelConfig) error {
	stageOf := map[string]string{} // the pipeline of a stage; "" for a model
	for i := range models {
		m := &models[i]
		if pipeline, taken := stageOf[m.Name]; taken && pipeline != "" {
			return fmt.Errorf("%w: model %q: that is the name of a stage of the pipeline %q", status.ErrInvalid, m.Name, pipeline)
		} else if taken {
			return fmt.Errorf("%w: model %q is declared twice", status.ErrInvalid, m.Name)
		}
		stageOf[m.Name] = ""
		for _, name := range m.stageNames() {
			if _, taken := stageOf[name]; taken {
				return fmt.Errorf("%w: model %q: that is the name of a stage of the pipeline %q", status.ErrInvalid, name, m.Name)
			}
			stageOf[name] = m.Name
		}
	}
	return nil
}

// stageNames are the names by which workers attach; none for a model without stages.
func (m *ModelConfig) stageNames() (names []string) {
	for i := range m.Stages {
		names = append(names, m.Name+"/"+m.Stages[i].Name)
	}
	return names
}

// workerGroups are the processes to start for a model, a group for each stage.
func (m *ModelConfig) workerGroups() []supervise.Group {
	if len(m.Stages) == 0 {
		return []supervise.Group{{Model: m.Name, Workers: m.Workers}}
	}
	var groups []supervise.Group
	for i := range m.Stages {
		groups = append(groups, supervise.Group{Model: m.Name + "/" + m.Stages[i].Name, Workers: m.Stages[i].Workers})
	}
	return groups
}

func (m *model) stageNamed(name string) (*stage, error) {
	for _, s := range m.stages {
		if s.Name() == m.name+"/"+name {
			return s, nil
		}
	}
	return nil, fmt.Errorf("%w: %q is a pipeline without a stage %q; its stages are %s",
		status.ErrUnknownModel, m.name, name, strings.Join(m.stageNames(), ", "))
}

func (m *model) stageNames() (names []string) {
	for _, s := range m.stages {
		names = append(names, s.Name())
	}
	return names
}

func (m *model) onlyStage() (*stage, error) {
	if m.isPipeline {
		return nil, fmt.Errorf("%w: %q is a pipeline; name one of its stages: %s",
			status.ErrInvalid, m.name, strings.Join(m.stageNames(), ", "))
	}
	return m.stages[0], nil
}

// shape is the same in all declarations of a model: its signature, and its stages'.
func (m *ModelConfig) shape() string {
	var b strings.Builder
	b.WriteString(m.Signature.String())
	for i := range m.Stages {
		fmt.Fprintf(&b, "; %s: %s", m.Stages[i].Name, &m.Stages[i].Signature)
	}
	return b.String()
}

// sumStages completes the line of a pipeline with its stages' counts. Only stages have
// batches and workers. The rows are those of the first stage.
func (m *model) sumStages(whole stats.Model, stages []stats.Model) stats.Model {
	whole.Name, whole.Signature, whole.Stages, whole.Policy = m.name, m.signature, m.stageNames(), m.policy()
	whole.MaxBatchSize = m.inForce().MaxBatchSize
	whole.Learned = stats.Learned{Costs: []stats.LearnedCost{}, Tried: []stats.TriedWait{}}
	whole.NotReady = ""
	whole.Rows = stages[0].Rows
	for i := range whole.Windows {
		whole.Windows[i].RowsPerS = stages[0].Windows[i].RowsPerS
	}
	for i := range stages {
		s := &stages[i]
		if i == 0 || s.ReadyWorkers < whole.ReadyWorkers {
			whole.ReadyWorkers = s.ReadyWorkers
		}
		if s.NotReady != "" && whole.NotReady == "" {
			whole.NotReady = "stage " + s.Name + ": " + s.NotReady
		}
		whole.QueueLength += s.QueueLength
		whole.QueueRows += s.QueueRows
		whole.Requeued += s.Requeued
		whole.Isolated += s.Isolated
		whole.StateBegun += s.StateBegun
		whole.StateBytes += s.StateBytes
		whole.WorkersSuspended += s.WorkersSuspended
		whole.WorkersAttached += s.WorkersAttached
		whole.WorkersLost += s.WorkersLost
		whole.WorkersHung += s.WorkersHung
		whole.Offenders += s.Offenders
	}
	return whole
}
