// SPDX-License-Identifier: Apache-2.0

// Command hosts tests relays on a real network on one machine. Each host is a
// network namespace with its own processes. Hosts are killed, stopped, cut off,
// slowed down and upgraded while two of them send requests.
//
//	go build -o bin/ ./cmd/ringbatch ./test/cmd/hosts && bin/hosts
//
// It needs root. Where namespaces cannot be made it says so and does nothing.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/test/testbed"
)

type options struct {
	requests int
	short    bool
	only     []string
	verbose  bool

	notJudged int // campaigns with a figure of a machine too busy to judge
}

func main() {
	testbed.Play(testbed.Roles{"worker": serveModel, "producer": testbed.With(produce)})
	var o options
	pflag.IntVar(&o.requests, "requests", 100_000, "requests of each campaign")
	pflag.BoolVar(&o.short, "short", false, "few requests of a few campaigns, and no demand on the throughput")
	pflag.StringSliceVar(&o.only, "only", nil, "these campaigns only: "+strings.Join(campaignNames(), ", "))
	pflag.BoolVar(&o.verbose, "verbose", false, "show what the processes log")
	pflag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, &o); err != nil {
		fmt.Fprintln(os.Stderr, "hosts:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o *options) error {
	if err := canMakeNamespaces(); err != nil {
		fmt.Printf("hosts-test is left out: network namespaces cannot be made here (%v)\n", err)
		return nil
	}
	if o.short {
		o.requests = min(o.requests, 10_000) // so that some are left when the fault strikes
	}
	for _, name := range o.only {
		if !slices.Contains(campaignNames(), name) {
			return fmt.Errorf("no campaign %q; there are %s", name, strings.Join(campaignNames(), ", "))
		}
	}
	var failed []error
	passed := 0
	for _, c := range campaigns {
		if len(o.only) > 0 && !slices.Contains(o.only, c.name) || len(o.only) == 0 && o.short && !c.short {
			continue
		}
		switch err := c.play(ctx, o); {
		case err == nil:
			passed++
		case errors.Is(err, errNoNetem):
			fmt.Printf("%-10s is left out: %v\n", c.name, err)
		default:
			failed = append(failed, fmt.Errorf("%s: %w", c.name, err))
			fmt.Printf("%-10s FAILED: %v\n", c.name, err)
		}
	}
	fmt.Printf("%d passed, %d failed; %d of them had something that this machine was too busy to judge\n", passed, len(failed), o.notJudged)
	return errors.Join(failed...)
}
