// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tools/profile"
	"github.com/ringbatch/ringbatch/tools/simulate"
)

// interrupted is the exit status after Ctrl-C, as shells have it.
const interrupted = exitCode(130)

func runSimulate(ctx context.Context, args []string) error {
	f := flags("simulate", " [MODEL]", simulate.About, simulate.Examples)
	command := simulate.NewCommand(f.FlagSet)
	socket := socketFlag(f)
	inputs := addFeedFlags(f)
	busy := f.IntSlice("busy", nil, "with a MODEL: numbers of busy workers to measure, `N,N…` (default: 1, 2, 4 … all)")
	length := f.Duration("duration", 15*time.Second, "with a MODEL: about how long to measure")
	out := f.String("out", "", "with a MODEL: write its costs, which --cost reads (CSV)")
	if err := parse(f, args, 0, 1); err != nil {
		return err
	}
	if f.NArg() == 1 {
		if f.Changed("share") {
			return fmt.Errorf("%w: --share and a MODEL exclude each other", errUsage)
		}
		if *length <= 0 || *length > time.Hour {
			return fmt.Errorf("%w: --duration is %v, must be more than 0 and at most 1h", errUsage, *length)
		}
		o := profile.Options{Socket: *socket, Model: f.Arg(0), Feed: inputs.feed, Busy: *busy, Time: *length, Patience: profile.UsualPatience}
		p, err := measure(ctx, o, inputs, *out)
		if err != nil {
			return err
		}
		var costs bytes.Buffer
		if err := p.WriteCost(&costs); err != nil {
			return err
		}
		if err := command.Measured(&costs, p.MaxBatchSize); err != nil {
			return fmt.Errorf("%w: %w", errUsage, err)
		}
	} else if name := given(f, "in", "busy", "duration", "out"); name != "" {
		return fmt.Errorf("%w: --%s needs a MODEL that runs", errUsage, name)
	}
	err := command.Run(ctx, os.Stdout)
	if errors.Is(err, status.ErrInvalid) {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	return err
}

// given returns the first of the flags that was given.
func given(f *flagSet, names ...string) string {
	for _, name := range names {
		if f.Changed(name) {
			return name
		}
	}
	return ""
}

// measure measures the costs of a running model. They go to stderr, and into the file out, even after an interrupt.
func measure(ctx context.Context, o profile.Options, inputs *feedFlags, out string) (*profile.Profile, error) {
	if err := progress.CanWrite(out); err != nil {
		return nil, fmt.Errorf("--out: %w", err)
	}
	if err := inputs.check(); err != nil {
		return nil, err
	}
	say := progress.New()
	o.Progress = func(share float64, doing string) { say.Say("%3.0f %%  %s", 100*share, doing) }
	p, err := profile.Measure(ctx, o)
	say.Clear()
	if p == nil || len(p.Points) == 0 {
		if errors.Is(err, context.Canceled) {
			fmt.Fprintln(os.Stderr, "ringbatch: interrupted before anything was measured")
			return nil, interrupted
		}
		return nil, inputs.explain(err)
	}
	unwritten := p.WriteText(os.Stderr)
	if out != "" {
		if failed := writeFile(out, p.WriteCost); failed != nil {
			unwritten = errors.Join(unwritten, fmt.Errorf("--out: %w", failed))
		}
	}
	switch {
	case unwritten != nil:
		return nil, unwritten
	case errors.Is(err, context.Canceled):
		return nil, interrupted
	}
	fmt.Fprintln(os.Stderr)
	return p, inputs.explain(err)
}

func writeFile(path string, write func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := write(file); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}
