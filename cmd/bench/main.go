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
	"strings"
	"syscall"

	"github.com/ringbatch/ringbatch/bench"
	"github.com/ringbatch/ringbatch/bench/gateway"
	"github.com/ringbatch/ringbatch/bench/pipeline"
	"github.com/ringbatch/ringbatch/bench/relay"
	"github.com/ringbatch/ringbatch/bench/transport"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/test/testbed"
)

var suites = map[string]func(context.Context, []string, io.Writer) error{
	"transport": transport.Run, "gateway": gateway.Run, "relay": relay.Run, "pipeline": pipeline.Run,
}

// roles of the processes of all suites.
func roles() testbed.Roles {
	all := bench.Roles()
	for _, more := range []testbed.Roles{transport.Roles(), gateway.Roles(), relay.Roles(), pipeline.Roles()} {
		maps.Copy(all, more)
	}
	return all
}

func main() {
	testbed.Play(roles())
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	run, args := bench.Run, os.Args[1:]
	if len(args) > 0 {
		if suite := suites[strings.TrimPrefix(args[0], "--suite=")]; suite != nil { // --suite=NAME is the older way to say it
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
