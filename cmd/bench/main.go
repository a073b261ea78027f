// SPDX-License-Identifier: Apache-2.0

// Command bench measures ringbatch on this machine; see docs/benchmark.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

func main() {
	testbed.Play(bench.Roles())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := bench.Run(ctx, os.Args[1:], os.Stdout); {
	case err == nil:
	case errors.Is(err, testbed.ErrInterrupted):
		fmt.Fprintln(os.Stderr, "bench: interrupted; every process was ended")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
