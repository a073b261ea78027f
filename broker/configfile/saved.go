// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/BurntSushi/toml"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// Saved is what `ringbatch set --save`, `scale --save` and `alias --save` changed: a file of
// its own, since people write the configuration and no program does. It is read after
// the configuration and wins over it.
type Saved struct {
	path string
	mu   sync.Mutex
}

// NewSaved is the file that belongs to a configuration file: beside it, or in the folder
// that a service manager keeps for the broker's state, if state names one. A service
// must not be able to write where its own configuration is.
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
	To   []string `toml:"to"` // model=percent; none: it was removed
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

// Apply puts what was saved over a configuration. Models that are no longer
// declared are left out.
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
			m := &cfg.Models[i]
			if name, stage, _ := strings.Cut(saved.Name, m.Name+"/"); name == "" && stage != "" {
				if err := saved.applyToStage(m, stage); err != nil {
					return fmt.Errorf("model %q, with the saved settings of %s: %w", saved.Name, s.path, err)
				}
			}
			if m.Name != saved.Name {
				continue
			}
			m.Policy = policy.Policy(saved.Policy).Over(m.Policy)
			if _, err := m.Policy.Resolve(m.Signature.Inputs); err != nil {
				return fmt.Errorf("model %q, with the saved settings of %s: %w", m.Name, s.path, err)
			}
			if saved.Instances > 0 && len(m.Workers) == 1 {
				m.Workers[0].Instances = saved.Instances
			}
		}
	}
	return nil
}

// applyToStage puts what was saved over a stage of a pipeline, if there is one of
// that name.
func (saved *savedModel) applyToStage(m *broker.ModelConfig, name string) error {
	for i := range m.Stages {
		s := &m.Stages[i]
		if s.Name != name {
			continue
		}
		s.Policy = policy.Policy(saved.Policy).Over(s.Policy)
		if saved.Instances > 0 && len(s.Workers) == 1 {
			s.Workers[0].Instances = saved.Instances
		}
		_, _, err := m.Resolve()
		return err
	}
	return nil
}

// Save adds a change of a model.
func (s *Saved) Save(model string, settings policy.Policy, instances int) error {
	return s.edit(func(f *savedFile) {
		at := -1
		for i := range f.Models {
			if f.Models[i].Name == model {
				at = i
			}
		}
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

// edit changes what is saved; the file is replaced whole or stays as it was.
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
