// SPDX-License-Identifier: Apache-2.0

// Command chaos breaks things on purpose. It starts brokers, workers and clients as
// processes, and kills, stops and poisons them from a seed. Every request must still
// end once, in time, with the right bytes or a named error, and nothing may be left behind.
//
//	chaos                    every campaign, at full length
//	chaos --short            the same in under a minute
//	chaos --only clients,workers --seed 7
//	chaos --only clients --seeds 10
//	chaos --soak 20m         everything at once, at low intensity
//
// The last line is "chaos: N passed, M failed", with the number of checks that
// could not be judged, if there are any. The exit status is 1 if M > 0.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/ringbatch/ringbatch/test/chaos"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func main() {
	chaos.PlaySleeper()
	testbed.Play(chaos.Roles())
	o := chaos.Options{}
	flag.Uint64Var(&o.Seed, "seed", 1, "seed of every random choice")
	flag.IntVar(&o.Seeds, "seeds", 1, "run each campaign with this many seeds, one after the other")
	flag.BoolVar(&o.Short, "short", false, "a minute's worth of each")
	only := flag.String("only", "", "campaigns, separated by commas; default all: "+strings.Join(chaos.Names(), ", "))
	flag.IntVar(&o.Events, "events", 0, "events of each campaign, instead of its own number")
	flag.DurationVar(&o.Soak, "soak", 0, "run everything at once at low intensity for this long, instead of the campaigns")
	flag.Parse()
	if *only != "" {
		o.Only = strings.Split(*only, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failed, err := chaos.Run(ctx, o)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "chaos: interrupted; every process was ended")
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(2)
	case failed > 0:
		os.Exit(1)
	}
}
