// SPDX-License-Identifier: Apache-2.0

// Package bench measures ringbatch with a model; cmd/bench is its command, docs/benchmark.md its manual. It starts a broker, model
// workers and producers as processes, loads them, and reports the figures beside the upper bound. Its sub-packages are the
// other suites; rig is their common part.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/tools/load"
)

// report is the outcome of a run.
type report interface{ Print(io.Writer) }

// Roles of the model suite's processes, and of all suites.
func Roles() testbed.Roles {
	return testbed.Roles{
		"broker":       testbed.With(testbed.PlayBroker), // workers declare its models
		"echo worker":  testbed.With(rig.EchoWorker),
		"model worker": testbed.With(modelWorkerRole),
		"alone":        testbed.With(aloneRole),
		"producer":     testbed.With(producerRole),
	}
}

// Run is `bench` without a suite's name. It measures and writes the report to out.
func Run(ctx context.Context, args []string, out io.Writer) error {
	o := options{}
	f := o.flags()
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return nil
		}
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("no suite %q; there are transport and waits, or flags only: see --help", f.Arg(0))
	}
	if err := o.check(f); err != nil {
		return err
	}
	say := progress.New()
	r, err := o.run(ctx, say)
	say.Clear()
	w := &reportWriter{out: out}
	if r != nil {
		r.Print(w)
	}
	if err != nil {
		return err
	}
	if o.json != "" {
		if err := rig.WriteJSON(o.json, r); err != nil {
			return err
		}
	}
	if w.err != nil {
		return fmt.Errorf("print the results: %w", w.err)
	}
	return nil
}

// reportWriter keeps the first error of a report.
type reportWriter struct {
	out io.Writer
	err error
}

func (w *reportWriter) Write(b []byte) (int, error) {
	n, err := w.out.Write(b)
	if w.err == nil {
		w.err = err
	}
	return n, err
}

// run returns the lines so far, in a demo, together with an error.
func (o *options) run(ctx context.Context, say *progress.Line) (report, error) {
	if o.demo {
		return runDemo(ctx, &o.cfg, say)
	}
	r, err := runSingle(ctx, &o.cfg, say)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// runSingle measures one configuration, with its bound.
func runSingle(ctx context.Context, cfg *config, say *progress.Line) (*load.Result, error) {
	f, err := newFleet(ctx)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	bound, err := f.startBound(cfg, say)
	if err != nil {
		return nil, err
	}
	r, err := f.measureOnce(cfg, bound, say)
	if err != nil {
		return nil, err
	}
	r.Config, r.Note = &cfg.Config, cfg.note()
	return r, nil
}

// fleet is all processes of one benchmark.
type fleet struct{ *testbed.Bed }

func newFleet(ctx context.Context) (*fleet, error) {
	bed, err := testbed.New(ctx)
	return &fleet{bed}, err
}

// measureOnce measures producers through the broker, or each by itself.
func (f *fleet) measureOnce(cfg *config, bound *bound, say *progress.Line) (*load.Result, error) {
	if cfg.NoDynamicBatch {
		return f.alone(cfg, cfg.WorkerNum, cfg.WorkerBatch, bound, say)
	}
	s, err := f.serve(cfg, say)
	if err != nil {
		return nil, err
	}
	defer s.end()
	return s.through(cfg.WorkerNum, bound, say)
}
