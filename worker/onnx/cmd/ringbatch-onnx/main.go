// SPDX-License-Identifier: Apache-2.0

// Command ringbatch-onnx serves an ONNX file with ONNX Runtime, without Python.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/onnx"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, pflag.ErrHelp):
	case err != nil && ctx.Err() == nil:
		fmt.Fprintln(os.Stderr, "ringbatch-onnx:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	f := pflag.NewFlagSet("ringbatch-onnx", pflag.ContinueOnError)
	f.SortFlags = false
	f.Usage = func() {
		fmt.Printf("Serve an ONNX file with ONNX Runtime, without Python.\n\nUsage: ringbatch-onnx [flags] FILE\n\n%s\nExample:\n"+
			"  ringbatch-onnx resnet50.onnx --library /usr/lib/libonnxruntime.so --max-batch-size 32\n", f.FlagUsages())
	}
	cfg := onnx.Config{}
	f.StringVar(&cfg.Library, "library", "", "libonnxruntime's path (default: $ONNXRUNTIME_LIBRARY, or what the system's linker finds)")
	f.StringVar(&cfg.Worker.Model, "name", "", "the model's name (default: $RINGBATCH_MODEL, or the file's)")
	f.StringToIntVar(&cfg.Dims, "dim", nil, "size of a dimension that the graph leaves open, by input and place: tokens.0=128 (repeatable)")
	f.StringArrayVar(&cfg.Outputs, "output", nil, "an output to serve (repeatable, in this order; default: all)")
	f.IntVar(&cfg.Threads, "threads", 0, "threads of one operation (default: one per core)")
	f.BoolVar(&cfg.NoSpin, "no-spin", false, "threads sleep between operations: where other processes need the cores")
	f.BoolVar(&cfg.NoCheck, "no-check", false, "serve also a model whose rows give other results in a batch than alone")
	f.Float64Var(&cfg.Tolerance, "tolerance", 0, "how far results may differ, as a part of the largest number (default 0.001, "+
		"with half precision outputs 0.02)")
	f.IntVar(&cfg.Worker.Depth, "depth", 2, "batches handed over at once")
	f.StringVar(&cfg.Worker.Socket, "socket", "", "the broker's control socket (default: $RINGBATCH_SOCKET, else "+
		"ringbatch/broker.sock in the user's runtime folder)")
	f.DurationVar(&cfg.Worker.WaitForBroker, "wait", 0, "how long to wait for a broker that does not run yet")
	asked := policyflag.Add(f)
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errors.New("name one ONNX file; see ringbatch-onnx --help")
	}
	cfg.File = f.Arg(0)
	var err error
	if cfg.Worker.Policy, err = asked.Policy(); err != nil {
		return err
	}
	file := strings.TrimSuffix(filepath.Base(cfg.File), filepath.Ext(cfg.File))
	cfg.Worker.Model = cmp.Or(cfg.Worker.Model, os.Getenv("RINGBATCH_MODEL"), file)
	cfg.Worker.Name = cmp.Or(os.Getenv("RINGBATCH_WORKER_NAME"), "onnx")
	var ready worker.Config
	cfg.Ready = func(w worker.Config) { ready = w }
	cfg.Worker.Attached = sync.OnceFunc(func() { fmt.Printf("serving %s: %s\n", ready.Model, &ready.Signature) })
	return onnx.Serve(ctx, cfg)
}
