// SPDX-License-Identifier: Apache-2.0

// Package bench measures ringbatch with a model; cmd/bench is its command, docs/benchmark.md its manual. It starts a broker, model
// workers and producers as processes of their own, loads them, and reports what came out, beside the upper bound. Its
// sub-packages are the other suites; rig is their common part.
package bench

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/progress"
)

// report is what a run produced.
type report interface{ print(io.Writer) }

// Run is `bench` without a suite's name: it measures what the flags ask for and writes the report to out.
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
		return fmt.Errorf("no suite %q; there are transport, gateway, relay and pipeline, or flags only: see --help", f.Arg(0))
	}
	if err := o.check(f); err != nil {
		return err
	}
	say := progress.New()
	r, err := o.run(ctx, say)
	say.Clear()
	w := &reportWriter{out: out}
	if r != nil {
		r.print(w)
	}
	if err != nil {
		return err
	}
	if o.json != "" {
		if err := rig.WriteJSON(o.json, r); err != nil {
			return err
		}
	}
	if o.plot != "" {
		if err := writePlot(o.plot, r.(drawable)); err != nil {
			return err
		}
		fmt.Fprintf(w, "\nchart: %s\n", o.plot)
	}
	if w.err != nil {
		return fmt.Errorf("print the results: %w", w.err)
	}
	return nil
}

// reportWriter keeps the first error, so that a report need not look at each
// line's.
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

// run does what the options ask for. A report can come with an error: what
// was measured before it.
func (o *options) run(ctx context.Context, say *progress.Line) (report, error) {
	switch {
	case o.demo:
		return runDemo(ctx, &o.cfg, say)
	default:
		r, err := runSingle(ctx, &o.cfg, say)
		return asReport(r, err)
	}
}

// asReport keeps a nil pointer from becoming a report.
func asReport[R report](r R, err error) (report, error) {
	if err != nil {
		return nil, err
	}
	return r, nil
}
