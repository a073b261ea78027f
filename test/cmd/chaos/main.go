// SPDX-License-Identifier: Apache-2.0

// Command chaos breaks things on purpose: it starts a broker, workers and
// clients as processes of their own, kills, stops and poisons them from a
// seed, and checks that every request still ends once, in time, with the
// right bytes or a named error, and that nothing is left behind.
//
//	chaos                    every campaign, at full length
//	chaos --short            the same in under a minute
//	chaos --only clients,workers --seed 7
//	chaos --soak 20m         all of it at once, at low intensity
//	chaos --long             the long figures; about three hours on 2 cores
//	chaos --long --parts clients,workers --limit 25m
//
// Its last line is "chaos: N passed, M failed", with the number of checks that
// could not be judged, if there are any; it exits with 1 if M > 0.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"github.com/ringbatch/ringbatch/test/chaos"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func main() {
	testbed.Play(chaos.Roles())
	o := chaos.Options{}
	flag.Uint64Var(&o.Seed, "seed", 1, "seed of every random choice")
	flag.BoolVar(&o.Short, "short", false, "a minute's worth of each")
	only := flag.String("only", "", "campaigns, separated by commas; default all: "+strings.Join(chaos.Names(), ", "))
	flag.IntVar(&o.Events, "events", 0, "events of each campaign, instead of its own number")
	flag.StringVar(&o.Report, "report", "", "write the results to this file, as JSON")
	flag.DurationVar(&o.Soak, "soak", 0, "run everything at once at low intensity for this long, instead of the campaigns")
	flag.StringVar(&o.Out, "out", "", "with --soak: folder for soak.md")
	l := chaos.LongOptions{Dir: "build/torture"}
	long := flag.Bool("long", false, "the long runs; a run that was interrupted goes on")
	longParts := flag.String("parts", "", "with --long: parts, separated by commas; default all: "+strings.Join(chaos.PartNames(), ", "))
	flag.DurationVar(&l.Limit, "limit", 0, "with --long: start nothing that would not end by then; 0: no limit")
	flag.IntVar(&l.Cores, "cores", runtime.NumCPU(), "with --long: cores to keep busy, with parts that can share the machine")
	flag.StringVar(&l.Table, "table", "", "with --long: write the table to this file")
	flag.Parse()
	if *only != "" {
		o.Only = strings.Split(*only, ",")
	}
	if *longParts != "" {
		l.Parts = strings.Split(*longParts, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failed, err := 0, error(nil)
	if *long {
		failed, err = chaos.RunLong(ctx, l)
	} else {
		failed, err = chaos.Run(ctx, o)
	}
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
