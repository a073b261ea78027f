// SPDX-License-Identifier: Apache-2.0

// Command torture runs the long campaigns: what the tests do briefly, by the
// hundred thousand, on real processes and in simulation. `make torture` builds
// what it needs beside it, and runs it.
//
//	torture                          everything; about three hours on 2 cores
//	torture --parts clients,workers  some parts
//	torture --limit 25m              what fits into that; run it again to go on
//	torture --table_only --results other.jsonl --results …   only write the table
//
// It can be interrupted at any time and resumed: slices that are done at this
// commit are not run again. Ctrl-C leaves no process behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/ringbatch/ringbatch/internal/torture"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "torture:", err)
		os.Exit(1)
	}
}

func run() error {
	var names []string
	for _, p := range torture.Parts {
		names = append(names, p.Name)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	o := torture.Options{Out: os.Stdout}
	parts := flag.String("parts", "", "parts, separated by commas; default all: "+strings.Join(names, ", "))
	flag.StringVar(&o.Bin, "bin", filepath.Dir(self), "folder with chaos and the test binaries")
	flag.StringVar(&o.Dir, "dir", "build/torture", "folder for the results")
	flag.IntVar(&o.Cores, "cores", runtime.NumCPU(), "how many cores to keep busy, with parts that can share the machine")
	flag.DurationVar(&o.Limit, "limit", 0, "start nothing that would not end by then; 0: no limit")
	flag.Float64Var(&o.Scale, "scale", 1, "multiply every target")
	table := flag.String("table", "", "write the table to this file")
	only := flag.Bool("table_only", false, "run nothing")
	var files []string
	flag.Func("results", "also take results of another machine into the table (repeatable)", func(file string) error { files = append(files, file); return nil })
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flag.Arg(0))
	}
	o.Parts = slices.Clone(torture.Parts)
	if *parts != "" {
		o.Parts = nil
		for name := range strings.SplitSeq(*parts, ",") {
			i := slices.Index(names, name)
			if i < 0 {
				return fmt.Errorf("no part %q; there are %s", name, strings.Join(names, ", "))
			}
			o.Parts = append(o.Parts, torture.Parts[i])
		}
	}
	failed := 0
	if !*only {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		failed, err = torture.Run(ctx, o)
	}
	if *table != "" {
		err = errors.Join(err, torture.WriteTable(*table, torture.Parts, append(files, torture.ResultsFile(o.Dir))...))
	}
	if errors.Is(err, context.Canceled) {
		return errors.New("interrupted; every process was ended, and what was done is kept: run it again to go on")
	}
	if err == nil && failed > 0 {
		err = fmt.Errorf("%d slices failed", failed)
	}
	return err
}
