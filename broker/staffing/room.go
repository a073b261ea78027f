// SPDX-License-Identifier: Apache-2.0

package staffing

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// The rule of room. Models that wait for room stand in a line, in the order in which they
// came. The first one gets free room. If that is too little, models sleep for it, the one
// that was used least recently first, but only if they make enough room together:
//
//   - an idle model after LeastStay, and a second without requests
//   - a busy model after its turn: Turn, or turnStarts times what its start took; it goes to
//     the end of the line
//   - a model whose start hangs after HangTime
//
// Until the first one fits, no model behind it gets room of the same GPU. So small models
// do not starve a large one, and each waits for at most one turn of each other model.
const (
	LeastStay = 2 * time.Second
	Turn      = 10 * time.Second
	HangTime  = 2 * time.Minute

	quietTime  = time.Second
	turnStarts = 4
)

// Bytes is memory by GPU.
type Bytes map[int]int64

// Tenant is a model as the rule of room sees it.
type Tenant struct {
	Name  string
	State State
	Needs Bytes // of its workers on GPUs with a budget; while it sleeps, of those with which it starts
	Stays bool  // it never sleeps for others
	Waits bool  // it is asleep, and wants to wake
	Since Time  // when it began to wait, or to wake
	Used  Time  // its last request
	Busy  bool  // requests are queued or run
	Took  Time  // its last start
}

// Plan is what the rule of room decides.
type Plan struct {
	Wake, Sleep []string
	Holders     map[string]string // for each model that goes on waiting: the holders of its room
}

// Room shares the memory of GPUs.
func Room(now Time, budgets Bytes, tenants []Tenant) Plan {
	p := Plan{Holders: map[string]string{}}
	free := maps.Clone(budgets)
	for i := range tenants {
		if t := &tenants[i]; t.State != Asleep {
			free.add(t.Needs, -1)
		}
	}
	for _, t := range line(tenants) {
		if free.has(t.Needs) {
			free.add(t.Needs, -1)
			p.Wake = append(p.Wake, t.Name)
			continue
		}
		p.Sleep = append(p.Sleep, makeRoom(now, maps.Clone(free), t, tenants)...)
		for gpu := range t.Needs {
			free[gpu] = math.MinInt64 / 2 // nobody behind it gets any
		}
		p.Holders[t.Name] = holders(t, tenants)
	}
	return p
}

// Fits says whether a model that is awake may take more room: it is free, and no model waits for it.
func Fits(budgets, more Bytes, tenants []Tenant) bool {
	free := maps.Clone(budgets)
	for i := range tenants {
		if t := &tenants[i]; t.State != Asleep || t.Waits {
			free.add(t.Needs, -1)
		}
	}
	return free.has(more)
}

// line is the models that wait, in the order in which they came.
func line(tenants []Tenant) (list []*Tenant) {
	for i := range tenants {
		if t := &tenants[i]; t.Waits && t.State == Asleep {
			list = append(list, t)
		}
	}
	slices.SortStableFunc(list, func(x, y *Tenant) int { return cmp.Compare(x.Since, y.Since) })
	return list
}

// makeRoom names the models that sleep for another one; none if that would not suffice.
// Room of models that are ending counts as free already.
func makeRoom(now Time, free Bytes, for_ *Tenant, tenants []Tenant) (names []string) {
	var may []*Tenant
	for i := range tenants {
		switch t := &tenants[i]; {
		case t.State == Ending:
			free.add(t.Needs, +1)
		case t.State != Asleep && t.mayYield(now):
			may = append(may, t)
		}
	}
	slices.SortStableFunc(may, func(x, y *Tenant) int { return cmp.Compare(x.usedAt(now), y.usedAt(now)) })
	for _, t := range may {
		if free.lacksSomeOf(t.Needs, for_.Needs) {
			free.add(t.Needs, +1)
			names = append(names, t.Name)
		}
	}
	if !free.has(for_.Needs) {
		return nil
	}
	return names
}

func (t *Tenant) mayYield(now Time) bool {
	stay := now - t.Since
	switch {
	case t.Stays:
		return false
	case t.State == Waking:
		return stay >= HangTime
	case t.Busy || now-t.Used < quietTime:
		return stay >= max(Turn, turnStarts*t.Took)
	}
	return stay >= max(LeastStay, t.Took)
}

// usedAt orders models by their last use. One with requests is in use now.
func (t *Tenant) usedAt(now Time) Time {
	if t.Busy {
		return now
	}
	return t.Used
}

// holders names the models that hold the room of a model, and its GPUs.
func holders(t *Tenant, tenants []Tenant) string {
	gpus := strings.Trim(fmt.Sprint(slices.Sorted(maps.Keys(t.Needs))), "[]")
	var names []string
	for i := range tenants {
		x := &tenants[i]
		for gpu := range t.Needs {
			if x.State != Asleep && x.Needs[gpu] > 0 && !slices.Contains(names, x.Name) {
				names = append(names, x.Name)
			}
		}
	}
	if len(names) == 0 {
		return "its turn for GPU " + gpus + " has not come"
	}
	return fmt.Sprintf("%s held the room of GPU %s", strings.Join(names, ", "), gpus)
}

func (b Bytes) add(needs Bytes, sign int64) {
	for g, n := range needs {
		b[g] += sign * n
	}
}

func (b Bytes) has(needs Bytes) bool { return !b.lacksSomeOf(needs, needs) }

// lacksSomeOf says whether it has too little on a GPU on which another one has some.
func (b Bytes) lacksSomeOf(others, needs Bytes) bool {
	for g, n := range needs {
		if n > b[g] && others[g] > 0 {
			return true
		}
	}
	return false
}
