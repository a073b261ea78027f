// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/tools/load"
)

// options are all flags.
type options struct {
	cfg  config
	json string
	demo bool
}

func (o *options) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("bench", pflag.ContinueOnError)
	f.SortFlags = false
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "-", "_")) // --wait-time is --wait_time
	})
	o.cfg.bind(f)
	f.StringVar(&o.json, "json", "", "write the results to this file")
	f.BoolVar(&o.demo, "demo", false, "a short tour: alone, each on its own, through ringbatch, the bound")
	f.Usage = func() { fmt.Fprintf(os.Stderr, usageText, f.FlagUsages()) }
	return f
}

const usageText = `Measure ringbatch: start a broker, model workers and producers as processes, load
them, and print the figures beside the upper bound.

  bench --worker_num=64 --max_batch_size=32 --model_num=1 --wait_time=0.005
  bench --worker_num=64 --no_dynamic_batch          # every producer on its own
  bench --rate=500 --worker_num=16                  # open loop, Poisson arrivals
  bench --demo                                      # a short tour

Other suites, each with its own flags (--help):

  bench transport      the cost of ringbatch itself, without a model
  bench waits          wait_time auto beside fixed waits, simulated

%s`

// check refuses impossible options before any process starts.
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
	if err := progress.CanWrite(o.json); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return nil
}

// shorten sets the demo's defaults.
func (o *options) shorten(f *pflag.FlagSet) error {
	for _, name := range []string{"no_dynamic_batch", "rate", "bound", "worker_batch"} {
		if f.Changed(name) {
			return fmt.Errorf("--%s does not go with --demo, which chooses it itself", name)
		}
	}
	if !f.Changed("worker_num") {
		o.cfg.WorkerNum = demoProducers
	}
	if !f.Changed("duration") {
		o.cfg.Duration = load.Seconds(demoDuration)
	}
	if !f.Changed("warmup") {
		o.cfg.Warmup = load.Seconds(demoWarmup)
	}
	if !f.Changed("max_windows") {
		o.cfg.MaxWindows = demoWindows
	}
	return nil
}
