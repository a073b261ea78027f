// SPDX-License-Identifier: Apache-2.0

// Package policyflag gives a command a flag for each key of a policy.
package policyflag

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/policy"
)

// Name is the flag of a policy's key: wait-time of wait_time, and buckets.a_b.0 of itself.
func Name(key string) string {
	name, _, _ := strings.Cut(key, ".")
	return strings.ReplaceAll(name, "_", "-") + key[len(name):]
}

// Flags are the flags of a policy.
type Flags struct {
	set  *pflag.FlagSet
	keys []policy.Key
	more *[]string
}

// Add adds a flag for each of the named keys, or for all keys, and --policy for other
// settings.
func Add(f *pflag.FlagSet, names ...string) *Flags {
	p := &Flags{set: f}
	for _, k := range policy.Keys() {
		if k.Sub != "" || len(names) > 0 && !slices.Contains(names, k.Name) {
			continue
		}
		help := k.Help
		if k.DefaultNote != "" {
			help += " (default: " + k.DefaultNote + ")"
		}
		flag := f.VarPF(&text{value: k.Default, kind: k.Kind}, Name(k.Name), "", help)
		if k.Kind == "bool" {
			flag.NoOptDefVal = "true"
		}
		p.keys = append(p.keys, k)
	}
	p.more = f.StringArray("policy", nil, "further settings as `KEY=VALUE`, like 'max_queue.1=100 buckets.tokens.0=64,512' (repeatable)")
	return p
}

// Policy is the policy of the flags that were given.
func (p *Flags) Policy() (policy.Policy, error) {
	asked, err := policy.Parse(strings.Join(*p.more, " "))
	if err != nil {
		return nil, fmt.Errorf("--policy: %w", err)
	}
	for _, k := range p.keys {
		if p.set.Changed(Name(k.Name)) {
			asked[k.Name] = p.set.Lookup(Name(k.Name)).Value.String()
		}
	}
	return asked, nil
}

// Names are the names of all flags.
func (p *Flags) Names() (names []string) {
	for _, k := range p.keys {
		names = append(names, Name(k.Name))
	}
	return append(names, "policy")
}

// Given is the name of a flag that was given, or "".
func (p *Flags) Given() string {
	for _, name := range p.Names() {
		if p.set.Changed(name) {
			return name
		}
	}
	return ""
}

// text is a flag's value. Only Policy parses it.
type text struct{ value, kind string }

func (t *text) String() string         { return t.value }
func (t *text) Set(value string) error { t.value = value; return nil }
func (t *text) Type() string           { return strings.ReplaceAll(t.kind, " or ", "|") }
