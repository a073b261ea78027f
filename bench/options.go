package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// options are all flags.
type options struct {
	cfg       config
	transport transportOptions
	suite     string
	json      string
	plot      string
	long      bool
}

var suites = []string{"transport", "tables"}

func (o *options) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	f.SortFlags = false
	o.cfg.bind(f)
	f.StringVar(&o.json, "json", "", "write the results to this file")
	f.StringVar(&o.plot, "plot", "", "draw the results into this SVG file")
	f.StringVar(&o.suite, "suite", "", "instead of one configuration, measure a suite: "+strings.Join(suites, ", "))
	f.StringSliceVar(&o.transport.Only, "only", nil, "transport: only these parts of "+strings.Join(transportParts, ","))
	f.IntVar(&o.transport.Rounds, "rounds", 7, "transport: turns of each comparison")
	f.DurationVar(&o.transport.Round, "round", time.Second, "transport: length of one turn")
	f.DurationVar(&o.transport.Idle, "idle", 6*time.Second, "transport: how long idleness is watched")
	f.IntVar(&o.transport.Requests, "requests", 1_000_000, "transport: requests of the in_flight part")
	f.BoolVar(&o.long, "long", false, "transport: 10 million requests in the in_flight part")
	f.Usage = func() { fmt.Fprintf(os.Stderr, usage0, f.FlagUsages()) }
	return f
}

const usage0 = `Measure ringbatch: starts a broker, model workers and producers as processes of
their own, loads them, and prints what came out, beside the upper bound.

  bench --worker_num=64 --max_batch_size=32 --model_num=1 --wait_time=0.005
  bench --worker_num=64 --no_dynamic_batch          # every producer on its own
  bench --rate=500 --worker_num=16                  # open loop, Poisson arrivals
  bench --concurrency_range=2:16:2 --plot=sweep.svg
  bench --suite=transport                           # what ringbatch itself costs
  bench --suite=tables                              # the three well-known tables

%s`

// check refuses what cannot work before anything is started.
func (o *options) check(f *pflag.FlagSet) error {
	if o.suite != "" && !slices.Contains(suites, o.suite) {
		return fmt.Errorf("--suite: no suite %q; there are %s", o.suite, strings.Join(suites, ", "))
	}
	if o.suite == "transport" {
		if o.long {
			o.transport.Requests = 10_000_000
		}
		return o.transport.validate()
	}
	for _, name := range []string{"only", "rounds", "round", "idle", "requests", "long"} {
		if f.Changed(name) {
			return fmt.Errorf("--%s belongs to --suite=transport", name)
		}
	}
	o.cfg.fill()
	return o.cfg.validate()
}
