// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"

	"github.com/ringbatch/ringbatch/broker/simulate"
	"github.com/ringbatch/ringbatch/broker/simulate/fleet"
)

func runSimulate(ctx context.Context, args []string) error {
	play := simulate.Main
	if fleet.Asked(args) {
		play = fleet.Main
	}
	if code := play(ctx, args, os.Stdout, os.Stderr); code != 0 {
		return exitCode(code)
	}
	return nil
}
