// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"strings"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/spf13/pflag"
)

// options are all flags.
type options struct {
	cfg  config
	json string
	plot string
	demo bool
}

func (o *options) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	f.SortFlags = false
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		if name == "svg" { // as ringbatch bench names it
			name = "plot"
		}
		return pflag.NormalizedName(strings.ReplaceAll(name, "-", "_")) // --wait-time is --wait_time
	})
	o.cfg.bind(f)
	f.StringVar(&o.json, "json", "", "write the results to this file")
	f.StringVar(&o.plot, "plot", "", "draw the results into this SVG file")
	f.BoolVar(&o.demo, "demo", false, "a short tour: alone, each on its own, through ringbatch, the bound; draws "+demoPlot)
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
  bench --demo                                      # a short tour

Other suites, each with flags of its own (--help):

  bench transport      what ringbatch itself costs, without a model
  bench gateway        what the gateway adds to bare net/http and gRPC
  bench relay          a relay beside bare gRPC, and what further hosts add
  bench pipeline       what a pipeline saves

%s`

// check refuses what cannot work before anything is started.
func (o *options) check(f *pflag.FlagSet) error {
	if o.demo {
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

// checkOutputs refuses files that could not be written.
func (o *options) checkOutputs() error {
	for name, path := range map[string]string{"json": o.json, "plot": o.plot} {
		if err := progress.CanWrite(path); err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
	}
	return nil
}

// shorten sets what the flags leave open for the demo.
func (o *options) shorten(f *pflag.FlagSet) error {
	for _, name := range []string{"no_dynamic_batch", "rate", "bound", "worker_batch"} {
		if f.Changed(name) {
			return fmt.Errorf("--%s does not go with --demo, which chooses it itself", name)
		}
	}
	if !f.Changed("worker_num") {
		o.cfg.WorkerNum = demoProducers
	}
	if o.plot == "" {
		o.plot = demoPlot
	}
	if !f.Changed("duration") {
		o.cfg.Duration = seconds(demoDuration)
	}
	if !f.Changed("warmup") {
		o.cfg.Warmup = seconds(demoWarmup)
	}
	if !f.Changed("max_windows") {
		o.cfg.MaxWindows = demoWindows
	}
	return nil
}
