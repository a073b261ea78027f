// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
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
	demo      bool
}

var suites = []string{"transport", "tables", "kill"}

// transportFlags are those of the transport suite alone.
var transportFlags = []string{"only", "rounds", "round", "idle", "requests", "long"}

func (o *options) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	f.SortFlags = false
	o.cfg.bind(f)
	f.StringVar(&o.json, "json", "", "write the results to this file")
	f.StringVar(&o.plot, "plot", "", "draw the results into this SVG file")
	f.BoolVar(&o.demo, "demo", false, "a short tour: alone, each on its own, through ringbatch, the bound; draws "+demoPlot)
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

// demoPlot is where the demo draws unless told otherwise.
const demoPlot = "ringbatch-demo.svg"

const usage0 = `Measure ringbatch: starts a broker, model workers and producers as processes of
their own, loads them, and prints what came out, beside the upper bound.

  bench --worker_num=64 --max_batch_size=32 --model_num=1 --wait_time=0.005
  bench --worker_num=64 --no_dynamic_batch          # every producer on its own
  bench --rate=500 --worker_num=16                  # open loop, Poisson arrivals
  bench --concurrency_range=2:16:2 --plot=sweep.svg
  bench --demo                                      # a short tour
  bench --suite=transport                           # what ringbatch itself costs
  bench --suite=tables                              # the three well-known tables

%s`

// check refuses what cannot work before anything is started.
func (o *options) check(f *pflag.FlagSet) error {
	if o.suite != "" && !slices.Contains(suites, o.suite) {
		return fmt.Errorf("--suite: no suite %q; there are %s", o.suite, strings.Join(suites, ", "))
	}
	if o.suite == "transport" {
		return o.checkTransport(f)
	}
	if o.suite == "kill" && o.plot != "" {
		return errors.New("--plot: the kill suite is a few lines; there is nothing to draw")
	}
	for _, name := range transportFlags {
		if f.Changed(name) {
			return fmt.Errorf("--%s belongs to --suite=transport", name)
		}
	}
	if o.demo || o.suite == "tables" {
		if err := o.shorten(f); err != nil {
			return err
		}
	}
	o.cfg.fill()
	if err := o.cfg.validate(); err != nil {
		return err
	}
	return o.checkOutputs()
}

// checkTransport refuses what the transport suite would ignore.
func (o *options) checkTransport(f *pflag.FlagSet) (err error) {
	if o.long {
		o.transport.Requests = 10_000_000
	}
	if o.plot != "" {
		return errors.New("--plot: the transport suite is a table; there is nothing to draw")
	}
	f.Visit(func(g *pflag.Flag) {
		if !slices.Contains([]string{"suite", "json"}, g.Name) && !slices.Contains(transportFlags, g.Name) {
			err = fmt.Errorf("--%s does not go with --suite=transport", g.Name)
		}
	})
	if err != nil {
		return err
	}
	if err := o.transport.validate(); err != nil {
		return err
	}
	return o.checkOutputs()
}

// checkOutputs refuses files that could not be written.
func (o *options) checkOutputs() error {
	for name, path := range map[string]string{"json": o.json, "plot": o.plot} {
		if err := progress.CanWrite(path); err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
	}
	return nil
}

// shorten sets what the flags leave open for the demo and for the tables.
func (o *options) shorten(f *pflag.FlagSet) error {
	for _, name := range []string{"no_dynamic_batch", "concurrency_range", "rate", "bound", "worker_batch"} {
		if f.Changed(name) {
			return fmt.Errorf("--%s does not go with --demo or --suite=tables: they choose it themselves", name)
		}
	}
	if o.demo && o.suite != "" {
		return errors.New("--demo and --suite do not go together")
	}
	duration, warmup, windows := tablesDuration, tablesWarmup, tablesWindows
	if o.demo {
		duration, warmup, windows = demoDuration, demoWarmup, demoWindows
		if !f.Changed("worker_num") {
			o.cfg.WorkerNum = demoProducers
		}
		if o.plot == "" {
			o.plot = demoPlot
		}
	} else {
		for _, name := range []string{"worker_num", "model_num"} {
			if f.Changed(name) {
				return fmt.Errorf("--%s does not go with --suite=tables: the tables choose it themselves", name)
			}
		}
		o.cfg.WorkerNum = tablesMostProducers // for the check of memory
	}
	if !f.Changed("duration") {
		o.cfg.Duration = seconds(duration)
	}
	if !f.Changed("warmup") {
		o.cfg.Warmup = seconds(warmup)
	}
	if !f.Changed("max_windows") {
		o.cfg.MaxWindows = windows
	}
	return nil
}
