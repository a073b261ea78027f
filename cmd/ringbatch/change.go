// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/policy"
)

func saveFlag(f *pflag.FlagSet) *bool {
	return f.Bool("save", false, "keep it for when the broker starts again, in a file beside its --config")
}

func runSet(ctx context.Context, args []string) error {
	f := flags("set", " MODEL KEY=VALUE…", "Change a model's policy while it runs; all the values are taken, or none.\nKeys: "+strings.Join(policy.Names(func(k policy.Key) bool { return k.Live }), ", ")+".\nThose of a priority level take its number: max_queue.1=500.",
		"  ringbatch set resnet50 wait_time=3ms max_batch_size=16\n  ringbatch set resnet50 wait_time=3ms --save\n")
	socket, save := socketFlag(f), saveFlag(f)
	if err := parse(f, args, 2, -1); err != nil {
		return err
	}
	p, err := policy.Parse(strings.Join(f.Args()[1:], " "))
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	set := admin.New(*socket).Set
	if *save {
		set = admin.New(*socket).SetAndSave
	}
	if err := set(ctx, f.Arg(0), p); err != nil {
		return err
	}
	fmt.Println("changed")
	return nil
}

func runRestart(ctx context.Context, args []string) error {
	f := flags("restart", " MODEL", "Replace the worker processes that the broker started for a model, one by one: each is told to\nend only after its successor has attached. No request is lost. Ends with 1 at the first that does\nnot come up; the old ones that are left go on.", "  ringbatch restart resnet50               # after its weights or its code changed\n")
	socket := socketFlag(f)
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	if err := admin.New(*socket).Restart(ctx, f.Arg(0)); err != nil {
		return err
	}
	fmt.Println("restarted")
	return nil
}

func runScale(ctx context.Context, args []string) error {
	f := flags("scale", " MODEL N", "Run N instances of a model's worker process. New ones have attached, and those that are too many\nhave finished their batches and ended, when it returns.", "  ringbatch scale resnet50 3 --save\n")
	socket, save := socketFlag(f), saveFlag(f)
	if err := parse(f, args, 2, 2); err != nil {
		return err
	}
	n, err := strconv.Atoi(f.Arg(1))
	if err != nil || n < 1 {
		return fmt.Errorf("%w: %q is not a number of instances, 1 or more", errUsage, f.Arg(1))
	}
	if err := admin.New(*socket).Scale(ctx, f.Arg(0), n, *save); err != nil {
		return err
	}
	fmt.Println("changed")
	return nil
}
