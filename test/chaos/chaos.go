// SPDX-License-Identifier: Apache-2.0

// Package chaos is the kill campaigns of test/cmd/chaos, on real processes.
package chaos

import (
	"context"
	"encoding/json"
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
	short int
	run   func(*run)
	root  bool // it becomes other users, or makes namespaces
}

var campaigns = []campaign{
	{"clients", "SIGKILL of clients at labelled steps and at random", 10000, 150, killClients, false},
	{"workers", "SIGKILL of workers in the middle of batches", 5000, 120, killWorkers, false},
	{"stops", "SIGSTOP of workers past their lease, then SIGCONT", 500, 12, stopWorkers, false},
	{"brokers", "SIGKILL of the broker under load, and its restart", 500, 8, killBrokers, false},
	{"poison", "1 to 10 % of the inputs kill the worker that runs them; events are batches", 2000, 60, poisonBatches, false},
	{"raises", "workers that begin to raise at every batch, inputs that make all raise; events are workers", 300, 6, raisingWorkers, false},
	{"hostile", "an attached process that breaks every rule; events are mutations", 100_000_000, 2_000_000, hostilePeer, false},
	{"signals", "SIGURG, SIGPROF, SIGUSR1 and SIGCHLD at kHz; events are signals", 100_000, 5_000, signalStorm, false},
	{"limits", "no descriptors for the broker, no disk for its log", 2, 2, limits, false},
	{"access", "who may connect, with real users", 5, 5, access, true},
	{"permissions", "who may infer, serve and administer, with real users; events are sets of permissions", 8, 8, permissions, true},
	{"foreign", "deaths of workers of another user, the end of the socket before that of the process", 500, 24, foreignDeaths, true},
	{"forks", "sessions that end in good order while a forked child keeps the connection", 192, 12, forkedChildren, false},
	{"frames", "unfinished frames and slow senders, 800 connections each, the broker in a small memory cgroup", 24, 8, unfinishedFrames, false},
	{"nuisances", "legal but costly: cancels, expired commits, huge rings, attach storms, long settings, idle connections, hang-ups, a refused user", 22, 3, annoy, true},
	{"standstill", "SIGSTOP of the broker past the deadlines of Go, C and Python clients", 50, 3, standstill, false},
	{"namespaces", "PID namespaces: deaths and an offender where numbers of processes mean nothing", 400, 30, namespaces, true},
	{"texts", "long names, terminal escapes, forged lines, many models", 200, 60, peersTexts, false},
	{"mishaps", "exceptions of signal handlers, closed event loops and raising callbacks in Python clients", 20, 1, pythonMishaps, false},
}

// Names are those of the campaigns.
func Names() (names []string) {
	for _, c := range campaigns {
		names = append(names, c.name)
	}
	return names
}

// Options choose what is run.
type Options struct {
	Seed   uint64
	Short  bool
	Only   []string // campaigns; none: all
	Events int      // of each campaign, instead of its own number; 0: that
	Soak   time.Duration
	Out    string // folder for the soak's files
	Report string // file for the results, as JSON
}

// Result is what a campaign came to.
type Result struct {
	Campaign                  string
	Seed                      uint64
	Events                    int // that really took place
	Passed, Failed, NotJudged int
	Answers                   int            // honest requests that got the right bytes
	Named                     map[string]int // and those that ended with a named error
	Spans                     map[string]Span
	Failures                  []string
	Seconds                   float64
}

// Span is how long something took, in milliseconds.
type Span struct {
	N             int
	P50, P99, Max float64
}

// Run runs campaigns, or the soak, and returns how many checks failed.
func Run(ctx context.Context, o Options) (failed int, err error) {
	for _, name := range o.Only {
		if !slices.Contains(Names(), name) {
			return 0, fmt.Errorf("no campaign %q; there are %s", name, strings.Join(Names(), ", "))
		}
	}
	var all score
	start := time.Now()
	var results []Result
	if o.Soak > 0 {
		all, results, err = soak(ctx, o)
	} else {
		all, results, err = runCampaigns(ctx, o)
	}
	if err == nil && ctx.Err() == nil {
		if o.Report != "" {
			text, err := json.Marshal(results)
			if err != nil {
				return all.failed, err
			}
			if err := os.WriteFile(o.Report, text, 0o644); err != nil {
				return all.failed, err
			}
		}
		fmt.Printf("chaos: %s in %v (seed %d)\n", all, time.Since(start).Round(time.Second), o.Seed)
	}
	return all.failed, err
}

func runCampaigns(ctx context.Context, o Options) (all score, results []Result, err error) {
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
		r, err := newRun(ctx, c.name, o.Seed, events)
		if err != nil {
			return all, results, err
		}
		fmt.Printf("== %s: %s (%d events, seed %d)\n", c.name, c.about, r.events, o.Seed)
		if c.root && os.Getuid() != 0 {
			r.notJudged("only root can do this")
		} else {
			r.guard(func() { c.run(r) })
		}
		results = append(results, r.close(o.Seed))
		all.add(r.score)
	}
	return all, results, nil
}
