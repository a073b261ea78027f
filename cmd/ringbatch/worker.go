// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
	"github.com/ringbatch/ringbatch/worker/cpu"
)

func runWorker(ctx context.Context, args []string) error {
	f := flags("worker", "", "Serve a built-in model. If the broker does not know the model yet, this worker declares it\nwith the policy given here.",
		`  ringbatch worker --model echo
  ringbatch worker --model affine --scale 2 --offset 1 --input 'x:f32[8]' --max_batch_size 64 --wait_time 1ms
  ringbatch worker --model echo --name thumbnails --input 'img:u8[<=512,<=512,3]'
  ringbatch worker --model mlp --gpu 0 --precision f16
  ringbatch worker --ptx my.ptx --kernel forward --input 'x:f32[8]' --output 'y:f32[8]'
`)
	socket := socketFlag(f)
	kind := f.String("model", "", "the built-in model: "+strings.Join(cpu.Names(), ", "))
	name := f.String("name", "", "serve it under this name (default: the model's)")
	inputs := f.StringArray("input", nil, "echo, affine, simulated: input tensor, name:dtype[dims] (repeatable; default x:f32[16])")
	scale := f.Float64("scale", 1, "affine: a of y = a·x + b")
	offset := f.Float64("offset", 0, "affine: b of y = a·x + b")
	fixed := f.Duration("simulated_fixed", 3*time.Millisecond, "simulated: what a batch costs")
	item := f.Duration("simulated_item", 100*time.Microsecond, "simulated: what each row adds")
	depth := f.Int("depth", worker.DefaultDepth, "batches handed over at once")
	pad := f.String("pad", "", "pad batches: fixed (to --pad_to rows) or preferred (to the next preferred size)")
	padTo := f.Int("pad_to", 0, "with --pad fixed: rows, at least max_batch_size")
	weight := f.Int("weight", 1, "share of the work relative to other workers")
	waitForBroker := f.Duration("wait_for_broker", 0, "wait that long for a broker that is not there yet")
	gpu := gpuFlags(f)
	asked := policyflag.Add(f)
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	if *kind == "" && gpu.ownKernel() {
		*kind = "ptx"
	}
	if *kind == "" {
		return fmt.Errorf("%w: --model says which built-in model to serve: %s", errUsage, strings.Join(cpu.Names(), ", "))
	}
	if err := rejectUnusedFlags(f, *kind); err != nil {
		return err
	}
	o := cpu.Options{Scale: *scale, Offset: *offset, FixedCost: *fixed, ItemCost: *item}
	for _, text := range *inputs {
		spec, err := tensor.ParseSpec(text)
		if err != nil {
			return err
		}
		o.Inputs = append(o.Inputs, spec)
	}
	m, serve, err := gpu.choose(*kind, o)
	if err != nil {
		return err
	}
	cfg := worker.Config{Alone: true, Model: *name, Signature: m.Signature, Socket: *socket, Name: *kind, Depth: *depth, Weight: *weight, Pad: *pad, PadTo: *padTo}
	if cfg.Model == "" { // a broker that starts us says what for
		cfg.Model = cmp.Or(os.Getenv("RINGBATCH_MODEL"), *kind)
	}
	cfg.Name = cmp.Or(os.Getenv("RINGBATCH_WORKER_NAME"), cfg.Name)
	cfg.WaitForBroker = *waitForBroker
	if cfg.Policy, err = asked.Policy(); err == nil {
		err = cfg.Policy.Check(m.Signature.Inputs)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	fmt.Printf("serving %s: %s\n", cfg.Model, &m.Signature)
	if m.Note != "" {
		fmt.Println("note:", m.Note)
	}
	return serve(ctx, cfg)
}

// rejectUnusedFlags refuses a flag that the chosen model does not use.
func rejectUnusedFlags(f *pflag.FlagSet, kind string) error {
	ptx, mlp := f.Changed("ptx"), kind == "mlp"
	for _, c := range []struct {
		uses  bool
		by    string
		flags []string
	}{
		{ptx || kind == "echo" || kind == "affine" || kind == "simulated", "echo, affine, simulated and --ptx", []string{"input"}},
		{kind == "simulated", "simulated", []string{"simulated_fixed", "simulated_item"}},
		{kind == "affine", "affine", []string{"scale", "offset"}},
		{mlp && f.Changed("gpu"), "mlp on a GPU (--gpu)", []string{"precision"}},
		{ptx || mlp, "mlp and --ptx", []string{"weights"}},
		{ptx, "--ptx", []string{"output", "kernel", "block", "threads_per_row"}},
	} {
		for _, flag := range c.flags {
			if f.Changed(flag) && !c.uses {
				return fmt.Errorf("%w: --%s is for %s", errUsage, flag, c.by)
			}
		}
	}
	return nil
}
