// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker/configfile"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

func saveFlag(f *flagSet) *bool {
	return f.Bool("save", false, "keep the change when the broker starts again, in a file beside its --config")
}

func runSet(ctx context.Context, args []string) error {
	live := policy.Names(func(k policy.Key) bool { return k.Live })
	f := flags("set", " MODEL KEY=VALUE…", "Change a model's policy while it runs. The broker takes all values or none.\n"+
		"Keys: "+strings.Join(live, ", ")+".\nKeys of a priority level take its number: max_queue.1=500.",
		"  ringbatch set resnet50 wait_time=3ms max_batch_size=16\n  ringbatch set resnet50 wait_time=3ms --save\n")
	socket, save := socketFlag(f), saveFlag(f)
	if err := parse(f, args, 2, -1); err != nil {
		return err
	}
	p, err := policy.Parse(strings.Join(f.Args()[1:], " "))
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	for key := range p {
		if slices.Contains(configfile.ModelKeys(), key) {
			return fmt.Errorf("%w: %s is a key of the configuration file: change it there, and reload it", errUsage, key)
		}
	}
	a := admin.New(*socket)
	set := a.Set
	if *save {
		set = a.SetAndSave
	}
	before, err := policyOf(ctx, a, f.Arg(0))
	if err != nil {
		return err
	}
	if err := set(ctx, f.Arg(0), p); err != nil {
		return err
	}
	after, err := policyOf(ctx, a, f.Arg(0))
	if err != nil {
		return err
	}
	printChange(p, before, after)
	return nil
}

// policyOf is the policy in force, empty for an unknown model.
func policyOf(ctx context.Context, a *admin.Client, model string) (policy.Policy, error) {
	models, err := a.Models(ctx)
	for i := range models {
		if models[i].Name == model {
			return models[i].Policy, err
		}
	}
	return nil, err
}

// printChange prints the asked keys, and all other changes, as old -> new.
func printChange(asked, before, after policy.Policy) {
	for _, key := range slices.Sorted(maps.Keys(after)) {
		base, _, _ := strings.Cut(key, ".")
		_, whole := asked[base]
		_, exact := asked[key]
		if was, is := cmp.Or(before[key], "none"), cmp.Or(after[key], "none"); was != is {
			fmt.Printf("%s: %s -> %s\n", key, was, is)
		} else if whole || exact {
			fmt.Printf("%s: %s (as before)\n", key, is)
		}
	}
	if wait, err := policy.ParseDuration(asked["wait_time"]); err == nil && wait > time.Second {
		fmt.Fprintf(os.Stderr, "warning: requests may wait %v for a batch to fill; a plain number is seconds, milliseconds are 3ms\n", wait)
	}
}

func runRestart(ctx context.Context, args []string) error {
	f := flags("restart", " MODEL", `Replace the worker processes that the broker started for a model, one by one: each ends only after
its successor has attached. No request is lost. At the first successor that does not come up, it
ends with status 1, and the old workers that are left go on.`,
		"  ringbatch restart resnet50               # after its weights or its code changed\n")
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

func runSleep(ctx context.Context, args []string) error {
	return runStaffing(ctx, args, "sleep", `End the worker processes that the broker started for a model, and free their memory. Its clients and
sequences stay, and the next request starts workers again. A model with requests is refused.`, "asleep", (*admin.Client).Sleep)
}

func runWake(ctx context.Context, args []string) error {
	return runStaffing(ctx, args, "wake", `Start the worker processes of a model that sleeps. It returns when they have attached. If their
GPU has no room, it waits for its turn.`, "awake", (*admin.Client).Wake)
}

func runStaffing(ctx context.Context, args []string, name, about, done string, do func(*admin.Client, context.Context, string) error) error {
	f := flags(name, " MODEL", about, "  ringbatch "+name+" resnet50\n")
	socket := socketFlag(f)
	asJSON := f.Bool("json", false, "print the model's staffing as JSON, as docs/stats.md describes it")
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	a := admin.New(*socket)
	if err := do(a, ctx, f.Arg(0)); err != nil {
		return err
	}
	if !*asJSON {
		_, err := fmt.Println(done)
		return err
	}
	s, err := a.Stats(ctx)
	if err != nil {
		return err
	}
	m := s.Model(f.Arg(0))
	if m == nil {
		return fmt.Errorf("%w: %s has gone", status.ErrUnknownModel, f.Arg(0))
	}
	return json.NewEncoder(os.Stdout).Encode(m.Staffing)
}

func runScale(ctx context.Context, args []string) error {
	f := flags("scale", " MODEL COUNT", `Set the number of a model's worker processes. When it returns, new ones have attached, and
superfluous ones have finished their batches and ended.`, "  ringbatch scale resnet50 3 --save\n")
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
