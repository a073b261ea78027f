// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"

	"github.com/ringbatch/ringbatch/tools/simulate"
)

func runSimulate(ctx context.Context, args []string) error {
	if code := simulate.Main(ctx, args, os.Stdout, os.Stderr); code != 0 {
		return exitCode(code)
	}
	return nil
}
