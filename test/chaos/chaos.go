// SPDX-License-Identifier: Apache-2.0

// Package chaos is the kill campaigns of test/cmd/chaos, on real processes.
package chaos

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// campaign is one way of breaking things.
type campaign struct {
	name  string
	about string
	full  int // events at full length
	short int // 0: left out of a short run
	run   func(*run)
	root  bool // it becomes other users, or makes namespaces
}

var campaigns = []campaign{
	{"clients", "SIGKILL of clients at labelled steps and at random", 10000, 150, killClients, false},
	{"workers", "SIGKILL of workers in the middle of batches", 5000, 120, killWorkers, false},
	{"sequences", "deaths in sequences with state: SIGKILL of workers and clients, hang-ups of clients", 150_000, 360, killSequences, false},
	{"lanes", "SIGKILL of workers between the rounds of 16 rows, and of clients", 4000, 60, killLanes, false},
	{"streams", "SIGKILL of workers and clients in the middle of streams; events are answers", 1_000_000, 4000, killStreams, false},
	{"weights", "SIGKILL of publishers and workers of live weights; events are answers", 10_000_000, 50_000, killWeights, false},
	{"turns", "20 models with room for 5 under random load; events are seconds", 600, 0, turnModels, false},
	{"sleep", "the same, with SIGKILL of workers, starts that fail or hang, and another program's memory", 1000, 20, disturbModels, false},
	{"steps", "a load that rises tenfold, and workers that follow it; events are seconds at the high load", 180, 0, stepLoad, false},
	{"stops", "SIGSTOP of workers past their lease, then SIGCONT", 500, 12, stopWorkers, false},
	{"brokers", "SIGKILL of the broker under load, and its restart", 500, 8, killBrokers, false},
	{"poison", "1 to 10 % of the inputs kill their worker; events are batches", 2000, 60, poisonBatches, false},
	{"raises", "workers that raise at every batch, inputs at which every worker raises; events are workers", 300, 6, raisingWorkers, false},
	{"beside", "8 honest clients beside one whose inputs raise, change or kill; events are rounds", 5, 1, honestBesideHostile, false},
	{"hostile", "an attached process that breaks every rule; events are mutations", 100_000_000, 1_000_000, hostilePeer, false},
	{"signals", "SIGURG, SIGPROF, SIGUSR1 and SIGCHLD at kHz; events are signals", 100_000, 5_000, signalStorm, false},
	{"foreign", "deaths of another user's workers, which may hang up before they die", 500, 24, foreignDeaths, true},
	{"forks", "sessions that end in good order while a forked child keeps the connection", 192, 12, forkedChildren, false},
	{"nuisances", "legal but costly: floods, huge rings, attach storms, unfinished frames, a refused user", 24, 3, annoy, true},
	{"standstill", "SIGSTOP of the broker past the deadlines of Go, C and Python clients", 50, 3, standstill, false},
	{"namespaces", "deaths and an offender in other PID namespaces", 400, 30, namespaces, true},
}

// Names lists the campaigns.
func Names() (names []string) {
	for _, c := range campaigns {
		names = append(names, c.name)
	}
	return names
}

// Options select the campaigns and their length.
type Options struct {
	Seed   uint64
	Seeds  int // run each campaign with this many seeds, from Seed on
	Short  bool
	Only   []string // campaigns; none: all
	Events int      // of each campaign; 0: its own number
	Soak   time.Duration
}

// Run runs campaigns, or the soak, and returns the number of failed checks.
func Run(ctx context.Context, o Options) (failed int, err error) {
	for _, name := range o.Only {
		if !slices.Contains(Names(), name) {
			return 0, fmt.Errorf("no campaign %q; there are %s", name, strings.Join(Names(), ", "))
		}
	}
	var all score
	start := time.Now()
	if o.Soak > 0 {
		all, err = soak(ctx, o)
	} else {
		all, err = runCampaigns(ctx, o)
	}
	if err == nil && ctx.Err() == nil {
		fmt.Printf("chaos: %s in %v (seed %d)\n", all, time.Since(start).Round(time.Second), o.Seed)
	}
	return all.failed, err
}

func runCampaigns(ctx context.Context, o Options) (all score, err error) {
	for _, c := range campaigns {
		if len(o.Only) > 0 && !slices.Contains(o.Only, c.name) {
			continue
		}
		events := c.full
		if o.Short {
			events = c.short
		}
		if o.Events > 0 {
			events = o.Events
		}
		if events == 0 {
			continue
		}
		for seed := o.Seed; seed < o.Seed+uint64(max(1, o.Seeds)) && ctx.Err() == nil; seed++ {
			r, err := newRun(ctx, c.name, seed, events)
			if err != nil {
				return all, err
			}
			fmt.Printf("== %s: %s (%d events, seed %d)\n", c.name, c.about, r.events, seed)
			if c.root && os.Getuid() != 0 {
				r.notJudged("only root can do this")
			} else {
				r.guard(func() { c.run(r) })
			}
			r.close()
			all.add(r.score)
		}
	}
	return all, nil
}
