// Command chaos breaks things on purpose: it starts a broker, workers and
// clients as processes of their own, kills, stops and poisons them from a
// seed, and checks that every request still ends once, in time, with the
// right bytes or a named error, and that nothing is left behind.
//
//	chaos                    every campaign, at full length
//	chaos --short            the same in under a minute
//	chaos --only clients,workers --seed 7
//	chaos --soak 20m         all of it at once, at low intensity, with a plot
//
// Its last line is "chaos: N passed, M failed"; it exits with 1 if M > 0.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"
)

// campaign is one way of breaking things.
type campaign struct {
	name  string
	about string
	full  int // events at full length
	short int
	run   func(*run) error
}

var campaigns = []campaign{
	{"clients", "SIGKILL of clients at labelled steps and at random", 10000, 150, killClients},
	{"workers", "SIGKILL of workers in the middle of batches", 5000, 100, killWorkers},
	{"stops", "SIGSTOP of workers past their lease, then SIGCONT", 500, 12, stopWorkers},
	{"brokers", "SIGKILL of the broker under load, and its restart", 500, 8, killBrokers},
	{"poison", "1 to 10 % of the inputs kill the worker that runs them; events are batches", 2000, 60, poisonBatches},
	{"hostile", "an attached process that breaks every rule; events are mutations", 100_000_000, 2_000_000, hostilePeer},
	{"signals", "SIGURG, SIGPROF, SIGUSR1 and SIGCHLD at kHz; events are signals", 100_000, 5_000, signalStorm},
	{"limits", "no descriptors for the broker, no disk for its log", 2, 2, limits},
	{"access", "who may connect, with real users", 5, 5, access},
}

func main() {
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(play(role))
	}
	var (
		seed  = flag.Uint64("seed", 1, "seed of every random choice")
		short = flag.Bool("short", false, "a minute's worth of each")
		only  = flag.String("only", "", "campaigns, separated by commas; default all")
		scale = flag.Float64("scale", 1, "multiply the number of events")
		soakD = flag.Duration("soak", 0, "run everything at once at low intensity for this long, instead of the campaigns")
		out   = flag.String("out", "", "with --soak: folder for soak.svg and soak.md")
	)
	flag.Parse()
	if *soakD > 0 {
		os.Exit(soak(*seed, *soakD, *out))
	}
	passed, failed := 0, 0
	start := time.Now()
	for _, c := range campaigns {
		if *only != "" && !strings.Contains(","+*only+",", ","+c.name+",") {
			continue
		}
		events := c.full
		if *short {
			events = c.short
		}
		r := newRun(c.name, *seed, max(1, int(float64(events)**scale)))
		fmt.Printf("== %s: %s (%d events, seed %d)\n", c.name, c.about, r.events, *seed)
		if err := c.run(r); err != nil {
			r.fail("campaign: %v", err)
		}
		r.close()
		passed += r.passed
		failed += r.failed
	}
	fmt.Printf("chaos: %d passed, %d failed in %v (seed %d)\n", passed, failed, time.Since(start).Round(time.Second), *seed)
	if failed > 0 {
		os.Exit(1)
	}
}
