// SPDX-License-Identifier: Apache-2.0

// Package policy has every setting of a model's batching, in one table of keys (keys.go).
// The configuration file, flags, `ringbatch set`, the wire, C and Python all write a
// policy as texts by key and know no key by name. So a new setting is one row of the table.
//
//	p := policy.New(policy.MaxBatchSize(32), policy.WaitTime(5*time.Millisecond), policy.MaxQueue(100).At(1))
//	p := policy.Policy{"max_batch_size": "32", "wait_time": "5ms", "max_queue.1": "100"} // the same
//	s, err := p.Resolve(signature.Inputs) // with defaults, checked
package policy

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// Policy is texts by key. A missing key takes its default. A key of the priority levels
// applies to all of them, or to one if its number follows: "max_queue", "max_queue.1".
// Buckets name an input and a dimension: "buckets.tokens.0".
type Policy map[string]string

// Setting is one value for a Policy, made by the function of its key.
type Setting struct{ key, text string }

// At limits a setting to a single priority level.
func (s Setting) At(level int) Setting {
	s.key += "." + strconv.Itoa(level)
	return s
}

// New makes a policy of settings.
func New(settings ...Setting) Policy {
	p := Policy{}
	for _, s := range settings {
		p[s.key] = s.text
	}
	return p
}

// Parse parses "key=value" pairs with blanks or line ends between them.
func Parse(text string) (Policy, error) {
	p := Policy{}
	for _, pair := range strings.Fields(text) {
		// A tensor's name may have a "=", a value has none.
		i := strings.LastIndexByte(pair, '=')
		if i < 1 {
			return nil, fmt.Errorf("%w: %q is not key=value", status.ErrInvalid, pair)
		}
		if _, twice := p[pair[:i]]; twice {
			return nil, fmt.Errorf("%w: %s is set twice", status.ErrInvalid, pair[:i])
		}
		p[pair[:i]] = pair[i+1:]
	}
	return p, nil
}

// String is the text for Parse, in the order of the table.
func (p Policy) String() string {
	var pairs []string
	for _, e := range p.entries() {
		pairs = append(pairs, e.name()+"="+e.text)
	}
	return strings.Join(pairs, " ")
}

// Over is base with the settings of p. Those of all levels replace those of single levels.
func (p Policy) Over(base Policy) Policy {
	all := maps.Clone(base)
	if all == nil {
		all = Policy{}
	}
	for name := range p {
		for other := range all {
			if strings.HasPrefix(other, name+".") {
				delete(all, other)
			}
		}
	}
	maps.Copy(all, p)
	return all
}

// Known leaves out unknown keys, which a newer broker may have.
func (p Policy) Known() Policy {
	known := Policy{}
	for _, e := range p.entries() {
		if e.key != nil {
			known[e.name()] = e.text
		}
	}
	return known
}

// CheckLive refuses settings that cannot change while a model runs.
func (p Policy) CheckLive() error {
	for _, e := range p.entries() {
		if e.key == nil {
			return unknown(e.base)
		}
		if !e.key.Live {
			return fmt.Errorf("%w: %s cannot change while the model runs; these can: %s",
				status.ErrInvalid, e.base, strings.Join(Names(func(k Key) bool { return k.Live }), ", "))
		}
	}
	return nil
}

// Live is the part of p that may change while a model runs, fixed the rest.
func (p Policy) Live() (live, fixed Policy) {
	live, fixed = Policy{}, Policy{}
	for _, e := range p.entries() {
		if e.key != nil && e.key.Live {
			live[e.name()] = e.text
		} else {
			fixed[e.name()] = e.text
		}
	}
	return live, fixed
}

// Resolve is the policy in force for a model with these inputs: p with defaults for the
// rest. Errors wrap status.ErrInvalid and name the key.
func (p Policy) Resolve(inputs []tensor.Spec) (Settings, error) {
	s, err := p.parse(inputs)
	if err == nil {
		err = s.Validate()
	}
	return s, err
}

// Check refuses bad keys and values, one by one. Resolve also checks that they fit.
func (p Policy) Check(inputs []tensor.Spec) error {
	_, err := p.parse(inputs)
	return err
}

// Difference is a setting that differs from a policy.
type Difference struct{ Name, Is, Asked string }

// Differences lists the settings that differ from p. Its errors are those of Check.
func (p Policy) Differences(are *Settings, inputs []tensor.Spec) (list []Difference, err error) {
	s, err := p.parse(inputs)
	if err != nil {
		return nil, err
	}
	is, asked := are.Policy(inputs), s.Policy(inputs)
	for _, e := range asked.entries() {
		_, all := p[e.base]
		if _, one := p[e.name()]; (one || all) && is[e.name()] != e.text {
			list = append(list, Difference{e.name(), is[e.name()], e.text})
		}
	}
	return list, nil
}

// parse is Resolve without Validate.
func (p Policy) parse(inputs []tensor.Spec) (s Settings, err error) {
	entries := p.entries()
	for _, e := range entries {
		if e.key == nil {
			return s, unknown(e.base)
		}
	}
	if err := s.makeLevels(entries); err != nil {
		return s, err
	}
	var defaults []entry
	for _, k := range table {
		if k.Default != "" {
			defaults = append(defaults, entry{base: k.Name, text: k.Default, key: k})
		}
	}
	for _, e := range append(defaults, entries...) {
		if err := e.read(&s, inputs); err != nil {
			return s, fmt.Errorf("%w: %s=%s: %w", status.ErrInvalid, e.name(), e.text, err)
		}
	}
	return s, nil
}

// entry is one setting of a policy, with its row of the table.
type entry struct {
	base, sub string // the name before and after its first dot
	text      string
	key       *Key // nil: unknown
	order     int  // in the table
}

func (e *entry) name() string {
	if e.sub == "" {
		return e.base
	}
	return e.base + "." + e.sub
}

// entries are in the order of the table, all levels before single ones.
func (p Policy) entries() []entry {
	list := make([]entry, 0, len(p))
	for name, text := range p {
		e := entry{text: text, order: -1}
		e.base, e.sub, _ = strings.Cut(name, ".")
		if e.order = slices.IndexFunc(table, func(k *Key) bool { return k.Name == e.base }); e.order >= 0 {
			e.key = table[e.order]
		}
		list = append(list, e)
	}
	slices.SortFunc(list, func(x, y entry) int {
		if x.order != y.order {
			return x.order - y.order
		}
		return strings.Compare(x.name(), y.name())
	})
	return list
}

func (e *entry) read(s *Settings, inputs []tensor.Spec) error {
	at := place{s: s, inputs: inputs, sub: e.sub}
	switch {
	case e.key.PerLevel && e.sub == "":
		for i := range s.Levels {
			at.level = i
			if err := e.key.read(&at, e.text); err != nil {
				return err
			}
		}
		return nil
	case e.key.PerLevel:
		at.level, _ = levelNumber(e.sub) // makeLevels has checked it
	case e.sub != "" && e.key.Sub == "":
		return fmt.Errorf("%s has no parts", e.base)
	case e.sub == "" && e.key.Sub != "" && e.text != e.key.Whole:
		return fmt.Errorf("say which: %s.%s, or %s=%s", e.base, e.key.Sub, e.base, e.key.Whole)
	}
	return e.key.read(&at, e.text)
}

// makeLevels makes the priority levels: as many as priorities says, or as entries name.
func (s *Settings) makeLevels(entries []entry) error {
	n, given := 1, false
	for _, e := range entries {
		if e.key == prioritiesKey && e.sub == "" {
			var err error
			if n, err = number(1, MaxLevels).parse(e.text); err != nil {
				return fmt.Errorf("%w: %s=%s: %w", status.ErrInvalid, e.base, e.text, err)
			}
			given = true
		}
	}
	for _, e := range entries {
		if !e.key.PerLevel || e.sub == "" {
			continue
		}
		level, ok := levelNumber(e.sub)
		switch {
		case !ok || given && level >= n:
			return fmt.Errorf("%w: %s=%s: no such priority level, the model has 0..%d", status.ErrInvalid, e.name(), e.text, n-1)
		case !given:
			n = max(n, level+1)
		}
	}
	s.Levels = make([]Level, n)
	return nil
}

func levelNumber(text string) (int, bool) {
	n, err := strconv.Atoi(text)
	return n, err == nil && n >= 0 && n < MaxLevels && strconv.Itoa(n) == text
}

// Policy is the settings as texts of every key, for the inputs of Resolve.
func (s *Settings) Policy(inputs []tensor.Spec) Policy {
	p := Policy{}
	for _, k := range table {
		if !k.PerLevel {
			k.write(&place{s: s, inputs: inputs}, func(sub, text string) { p[(&entry{base: k.Name, sub: sub}).name()] = text })
			continue
		}
		for i := range s.Levels {
			k.write(&place{s: s, level: i}, func(_, text string) { p[k.Name+"."+strconv.Itoa(i)] = text })
		}
	}
	return p
}
