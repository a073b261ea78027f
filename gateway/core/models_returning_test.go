// SPDX-License-Identifier: Apache-2.0

package core

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/alias"
)

func TestWhatIsAwaitedAfterARestartOfTheBroker(t *testing.T) {
	m, k := newModels(nil), &Model{}
	before := func(until time.Duration, names ...string) {
		f := &former{map[string]bool{}, time.Now().Add(until)}
		for _, name := range names {
			f.names[name] = true
		}
		m.former.Store(f)
	}
	awaits := func(when, name, version string, want bool) {
		t.Helper()
		if err := m.Awaited(name, version); (err != nil) != want {
			t.Errorf("%s: %s, version %q: %v", when, name, version, err)
		}
	}
	prod := func(three, four *Model) *map[string]*route {
		return &map[string]*route{"prod": {Alias: alias.Alias{Name: "prod", To: []alias.Target{{Model: "resnet@3"}, {Model: "resnet@4"}}}, to: []*Model{three, four}}}
	}
	before(24*time.Hour, "prod", "resnet@3", "resnet@4")
	m.Routes.Store(prod(nil, nil)) // the broker's file has the alias
	m.forgetReturned()
	awaits("nothing is back", "prod", "", true)
	for version, want := range map[string]bool{"3": true, "resnet@4": true, "5": false, "prod": false} {
		awaits("nothing is back", "prod", version, want)
	}
	awaits("nothing is back", "resnet", "3", true)

	readers := m.former.Load().names
	m.byName.Store(&map[string]*Model{"resnet@3": k})
	m.Routes.Store(prod(k, nil))
	m.forgetReturned()
	awaits("one is back", "prod", "4", true)
	if len(readers) != 3 {
		t.Errorf("what readers have has changed: %v", readers)
	}
	m.byName.Store(&map[string]*Model{})
	m.Routes.Store(prod(nil, nil))
	awaits("it was removed", "resnet@3", "", false)
	awaits("it was removed", "prod", "3", false)
	awaits("it was removed", "prod", "", false)
	awaits("it was removed", "prod", "4", true)

	m.g = &Gateway{}
	m.g.Cfg.Pace.Workers = 24 * time.Hour
	m.former.Store(&former{})
	m.Routes.Store(&map[string]*route{})
	m.byName.Store(&map[string]*Model{"double": k})
	m.remember(&admin.Listing{Epoch: 1})
	m.remember(&admin.Listing{Epoch: 1, Draining: true})
	m.byName.Store(&map[string]*Model{}) // its worker was told to go
	m.remember(&admin.Listing{Epoch: 2})
	awaits("the broker had drained", "double", "", true)

	before(-time.Hour, "double")
	awaits("long after it", "double", "", false)
}
