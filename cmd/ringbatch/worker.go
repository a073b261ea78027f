// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
)

func runWorker(ctx context.Context, args []string) error {
	f := flags("worker", " ["+strings.Join(cpu.Names(), "|")+"]",
		`Serve a built-in model. If the broker does not know the model yet, this worker declares it with the
policy given here.`, `  ringbatch worker echo
  ringbatch worker affine --scale 2 --offset 1 --input 'x:f32[8]' --max-batch-size 64 --wait-time 1ms
  ringbatch worker echo --name thumbnails --input 'img:u8[<=512,<=512,3]'
  ringbatch worker mlp --gpu 0
  ringbatch worker mlp --weights net.npz
  ringbatch worker --ptx my.ptx --kernel forward --input 'x:f32[8]' --output 'y:f32[8]'
`)
	cfg, o := worker.Config{}, cpu.Options{}
	socket := socketFlag(f)
	f.StringVar(&cfg.Model, "name", "", "serve it under this name (default: the model's)")
	inputs := f.StringArray("input", nil, "echo, affine, simulated: input tensor, a `SPEC` like x:f32[8] (repeatable; default x:f32[16])")
	f.Float64Var(&o.Scale, "scale", 1, "affine: a of y = a·x + b")
	f.Float64Var(&o.Offset, "offset", 0, "affine: b of y = a·x + b")
	f.DurationVar(&o.FixedCost, "simulated-fixed", 3*time.Millisecond, "simulated: time per batch")
	f.DurationVar(&o.ItemCost, "simulated-item", 100*time.Microsecond, "simulated: time per row")
	f.IntVar(&cfg.Depth, "depth", 2, "batches handed over at once")
	f.StringVar(&cfg.Pad, "pad", "", "pad batches: fixed (to --pad-to rows) or preferred (to the next preferred size)")
	f.IntVar(&cfg.PadTo, "pad-to", 0, "with --pad fixed: rows, at least max_batch_size")
	f.IntVar(&cfg.Share, "share", 1, "share of the work, relative to other workers")
	wait, join := waitFlag(f), joinFlag(f)
	gpu := gpuFlags(f)
	asked := addPolicy(f)
	if err := parse(f, args, 0, 1); err != nil {
		return err
	}
	kind := f.Arg(0)
	if kind == "" && gpu.ownKernel() {
		kind = "ptx"
	}
	if kind == "" {
		return fmt.Errorf("%w: say which built-in model to serve: %s\nUsage: ringbatch %s", errUsage,
			strings.Join(cpu.Names(), ", "), f.usage)
	}
	if err := rejectUnusedFlags(f, kind); err != nil {
		return err
	}
	var err error
	if o.Inputs, err = tensor.ParseSpecs(*inputs, nil); err != nil {
		return err
	}
	m, serve, err := gpu.choose(kind, o)
	if err != nil {
		return err
	}
	if cfg.Version, err = join(); err == nil && cfg.Version == "" {
		cfg.Version, err = gpu.version(kind, o)
	}
	if err != nil {
		return err
	}
	cfg.Signature, cfg.Socket, cfg.WaitForBroker = m.Signature, *socket, *wait
	cfg.Model = cmp.Or(cfg.Model, os.Getenv("RINGBATCH_MODEL"), kind) // a broker sets the variables of its workers
	cfg.Name = cmp.Or(os.Getenv("RINGBATCH_WORKER_NAME"), kind)
	if cfg.Policy, err = asked.Policy(); err == nil {
		err = cfg.Policy.Check(m.Signature.Inputs)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if m.Note != "" {
		fmt.Println("note:", m.Note)
	}
	cfg.Attached = sync.OnceFunc(func() { fmt.Printf("serving %s: %s\n", cfg.Model, &m.Signature) })
	return serve(ctx, cfg)
}

// rejectUnusedFlags refuses a flag that the chosen model does not use.
func rejectUnusedFlags(f *flagSet, kind string) error {
	ptx := f.Changed("ptx")
	for _, c := range []struct {
		uses  bool
		by    string
		flags []string
	}{
		{ptx || kind == "echo" || kind == "affine" || kind == "simulated", "echo, affine, simulated and --ptx", []string{"input"}},
		{kind == "simulated", "simulated", []string{"simulated-fixed", "simulated-item"}},
		{kind == "affine", "affine", []string{"scale", "offset"}},
		{ptx || kind == "mlp", "mlp and --ptx", []string{"weights"}},
		{ptx, "--ptx", []string{"output", "kernel", "block", "threads-per-row"}},
	} {
		for _, flag := range c.flags {
			if f.Changed(flag) && !c.uses {
				return fmt.Errorf("%w: --%s is for %s", errUsage, flag, c.by)
			}
		}
	}
	return nil
}
