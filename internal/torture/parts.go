// SPDX-License-Identifier: Apache-2.0

// Package torture runs the long campaigns of cmd/torture: everything that the
// tests do briefly, by the hundred thousand.
//
// A part is cut into slices, each with seeds of its own and each a process:
// bin/chaos with one campaign, or a test binary with some seeds. What a slice
// came to is appended to a file, so that a run can be interrupted and resumed;
// the table is made of that file alone.
package torture

import (
	"fmt"
	"strconv"
	"time"
)

// Part is one of the long figures.
type Part struct {
	Name   string
	Unit   string
	Target int // events in all
	Slice  int // events of one run
	Cores  int // that a slice keeps busy; 0: it has the machine for itself
	About  string

	command func(s Slice) []string
}

// Slice is some events of a part.
type Slice struct {
	Part   string
	Index  int
	Seed   uint64 // of a campaign; of seeds, the first
	Events int
	report string // file for its results
}

// Parts in the order in which they are run.
var Parts = []Part{
	{"clients", "client kills", 100_000, 5_000, 2, "SIGKILL of Go, C and Python clients at labelled steps and at random", campaign("clients")},
	{"workers", "worker kills", 50_000, 2_500, 2, "SIGKILL of workers in the middle of batches", campaign("workers")},
	{"brokers", "broker restarts", 5_000, 250, 2, "SIGKILL of the broker under load, and its restart", campaign("brokers")},
	{"stops", "stopped workers", 5_000, 500, 2, "SIGSTOP of workers past their lease, then SIGCONT", campaign("stops")},
	{"poison", "batches", 20_000, 2_000, 2, "1 to 10 % of the inputs kill the worker that runs them", campaign("poison")},
	{"simulation", "seeds", 1_000_000, 20_000, 1, "the broker's core in simulated worlds: deaths, hangs, delays, nonsense", seeds("engine.test", "Simulated", "-seeds")},
	{"schedules", "seeds", 1_000_000, 50_000, 0, "the batcher against its reference", seeds("batcher.test", "RandomSchedules", "-schedules")},
	{"signals", "signals", 1_000_000, 100_000, 0, "SIGURG, SIGPROF, SIGUSR1 and SIGCHLD to everybody", campaign("signals")},
	{"hostile", "mutations", 1_000_000_000, 250_000_000, 0, "an attached process that breaks every rule", campaign("hostile")},
	{"soak", "minutes", 120, 120, 0, "everything at once, at low intensity", soak},
}

func campaign(name string) func(Slice) []string {
	return func(s Slice) []string {
		return []string{"chaos", "--only", name, "--events", strconv.Itoa(s.Events), "--seed", strconv.FormatUint(s.Seed, 10), "--report", s.report}
	}
}

func soak(s Slice) []string {
	return []string{"chaos", "--soak", fmt.Sprint(time.Duration(s.Events) * time.Minute), "--seed", strconv.FormatUint(s.Seed, 10), "--report", s.report}
}

func seeds(binary, test, flag string) func(Slice) []string {
	return func(s Slice) []string {
		return []string{binary, "-test.run", test, "-test.v", "-test.timeout", "0", flag, strconv.Itoa(s.Events), "-first_seed", strconv.FormatUint(s.Seed, 10)}
	}
}

// slices of a part; those with the same index have the same seeds in every run.
func (p *Part) slices() (all []Slice) {
	for done, i := 0, 0; done < p.Target; i++ {
		s := Slice{Part: p.Name, Index: i, Seed: uint64(i + 1), Events: min(p.Slice, p.Target-done)}
		if p.Unit == "seeds" {
			s.Seed = uint64(done + 1)
		}
		all = append(all, s)
		done += s.Events
	}
	return all
}
