// SPDX-License-Identifier: Apache-2.0

// Command bench measures ringbatch on this machine; see docs/benchmark.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"syscall"

	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/bench/transport"
	"github.com/ringbatch/ringbatch/bench/waits"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/test/testbed"
)

var suites = map[string]func(context.Context, []string, io.Writer) error{"transport": transport.Run, "waits": waits.Run}

// roles of the processes of all suites.
func roles() testbed.Roles {
	all := bench.Roles()
	maps.Copy(all, transport.Roles())
	return all
}

func main() {
	testbed.Play(roles())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run, args := bench.Run, os.Args[1:]
	if len(args) > 0 {
		if suite := suites[args[0]]; suite != nil {
			run, args = suite, args[1:]
		}
	}
	switch err := run(ctx, args, os.Stdout); {
	case err == nil:
	case errors.Is(err, progress.ErrInterrupted):
		fmt.Fprintln(os.Stderr, "bench: interrupted; every process was ended")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
