// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/BurntSushi/toml"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// Saved is the file of changes by `ringbatch set --save`, `scale --save` and `alias
// --save`. Only people write the configuration file, so programs write this one. It is
// read after the configuration and wins over it.
type Saved struct {
	path string
	mu   sync.Mutex
}

// NewSaved is the file beside a configuration file, or in the service manager's folder for
// the broker's state, if state names one: a service cannot write beside its configuration.
func NewSaved(config, state string) *Saved {
	path := config + ".saved"
	if folder, _, _ := strings.Cut(state, ":"); folder != "" {
		path = filepath.Join(folder, filepath.Base(path))
	}
	return &Saved{path: path}
}

type savedFile struct {
	Models  []savedModel `toml:"model"`
	Aliases []savedAlias `toml:"alias"`
}

type savedAlias struct {
	Name string   `toml:"name"`
	To   []string `toml:"to"` // model=percent; none: the alias was removed
}

type savedModel struct {
	Name      string            `toml:"name"`
	Instances int               `toml:"instances,omitzero"`
	Policy    map[string]string `toml:"policy,omitempty"`
}

const savedHead = "# Written by ringbatch set, scale and alias with --save. It is read after the\n" +
	"# configuration file, and wins over it; delete it to go back.\n\n"

func (s *Saved) read() (f savedFile, err error) {
	text, err := os.ReadFile(s.path)
	if errors.Is(err, os.ErrNotExist) {
		return f, nil
	}
	if err == nil {
		err = toml.Unmarshal(text, &f)
	}
	if err != nil {
		err = fmt.Errorf("%w: saved settings %s: %w", status.ErrInvalid, s.path, err)
	}
	return f, err
}

// Apply changes a configuration to the saved settings of models that it declares.
func (s *Saved) Apply(cfg *broker.Config) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, err := s.read()
	if err != nil {
		return err
	}
	if cfg.Aliases, err = f.applyAliases(cfg.Aliases); err != nil {
		return fmt.Errorf("saved settings %s: %w", s.path, err)
	}
	for _, saved := range f.Models {
		for i := range cfg.Models {
			if err := saved.applyToModel(&cfg.Models[i]); err != nil {
				return fmt.Errorf("model %q, with the saved settings of %s: %w", saved.Name, s.path, err)
			}
		}
	}
	return nil
}

// applyToModel changes a model, or a stage of a pipeline, if it has the saved name.
func (saved *savedModel) applyToModel(m *broker.ModelConfig) (err error) {
	if m.Name == saved.Name {
		m.Policy = saved.apply(m.Policy, m.Workers)
		_, err = m.Policy.Resolve(m.Signature.Inputs)
	}
	for i := range m.Stages {
		if s := &m.Stages[i]; m.Name+"/"+s.Name == saved.Name {
			s.Policy = saved.apply(s.Policy, s.Workers)
			err = m.Check()
		}
	}
	return err
}

func (saved *savedModel) apply(p policy.Policy, workers []supervise.Worker) policy.Policy {
	if saved.Instances > 0 && len(workers) == 1 {
		workers[0].Instances = saved.Instances
	}
	return policy.Policy(saved.Policy).Over(p)
}

// Save saves a change of a model.
func (s *Saved) Save(model string, settings policy.Policy, instances int) error {
	return s.edit(func(f *savedFile) {
		at := slices.IndexFunc(f.Models, func(m savedModel) bool { return m.Name == model })
		if at < 0 {
			at = len(f.Models)
			f.Models = append(f.Models, savedModel{Name: model})
		}
		m := &f.Models[at]
		m.Policy = settings.Over(m.Policy)
		if instances > 0 {
			m.Instances = instances
		}
	})
}

// edit replaces the file, whole or not at all.
func (s *Saved) edit(change func(*savedFile)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, err := s.read()
	if err != nil {
		return err
	}
	change(&f)
	var text bytes.Buffer
	text.WriteString(savedHead)
	if err := toml.NewEncoder(&text).Encode(f); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(s.path), filepath.Base(s.path)+".*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // nothing if it was moved
	_, err = tmp.Write(text.Bytes())
	if err = errors.Join(err, tmp.Chmod(0o644), tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), s.path)
}
