// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/tools/top"
)

func runTop(ctx context.Context, args []string) error {
	f := flags("top", " [MODEL]", "Show models and workers as a table in the terminal, live. s sorts by the next column, q quits.\n"+
		"`ringbatch dashboard` serves a page that shows more.", "  ringbatch top\n  ringbatch top resnet50 --interval 200ms\n")
	socket := socketFlag(f)
	interval := f.Duration("interval", time.Second, "how often to ask the broker, at least 100ms")
	if err := parse(f, args, 0, 1); err != nil {
		return err
	}
	if *interval < 100*time.Millisecond {
		return fmt.Errorf("%w: --interval is %v, must be at least 100ms", errUsage, *interval)
	}
	return top.Run(ctx, top.Config{Socket: *socket, Model: f.Arg(0), Interval: *interval})
}
