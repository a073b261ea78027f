// SPDX-License-Identifier: Apache-2.0

package configfile

import (
	"fmt"
	"maps"
	"slices"

	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/status"
)

// fileAliases is the table [alias]: by name, a model, or models with shares in percent.
type fileAliases map[string]any

func (f fileAliases) parseAliases() (list []alias.Alias, err error) {
	for _, name := range slices.Sorted(maps.Keys(f)) {
		a := alias.Alias{Name: name}
		switch to := f[name].(type) {
		case string:
			a.To = []alias.Target{{Model: to, Share: alias.Whole}}
		case map[string]any:
			for model, share := range to {
				t, err := parseTarget(model, share)
				if err != nil {
					return nil, fmt.Errorf("alias %q: %w", name, err)
				}
				a.To = append(a.To, t)
			}
		default:
			return nil, fmt.Errorf("%w: alias %q: %v is neither a model's name nor a table of models and their shares",
				status.ErrInvalid, name, to)
		}
		if err := a.Check(); err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

func parseTarget(model string, share any) (t alias.Target, err error) {
	t.Model = model
	switch p := share.(type) {
	case int64:
		t.Share, err = alias.Percent(float64(p))
	case float64:
		t.Share, err = alias.Percent(p)
	default:
		err = fmt.Errorf("%w: the share of %q is %v, must be a number of percent; names with dots or @ take quotes",
			status.ErrInvalid, model, share)
	}
	return t, err
}

func (f *savedFile) applyAliases(list []alias.Alias) ([]alias.Alias, error) {
	for _, saved := range f.Aliases {
		list = slices.DeleteFunc(list, func(a alias.Alias) bool { return a.Name == saved.Name })
		if len(saved.To) == 0 {
			continue // removed
		}
		a, err := alias.Parse(saved.Name, saved.To...)
		if err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	return list, nil
}

// SaveAlias saves a change of an alias; without targets, its removal.
func (s *Saved) SaveAlias(a alias.Alias) error {
	saved := savedAlias{Name: a.Name, To: []string{}}
	for _, t := range a.To {
		saved.To = append(saved.To, fmt.Sprintf("%s=%v", t.Model, t.Share.Percent()))
	}
	return s.edit(func(f *savedFile) {
		f.Aliases = slices.DeleteFunc(f.Aliases, func(other savedAlias) bool { return other.Name == a.Name })
		f.Aliases = append(f.Aliases, saved)
	})
}
