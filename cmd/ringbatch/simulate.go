// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tools/simulate"
)

func runSimulate(ctx context.Context, args []string) error {
	f := flags("simulate", "", simulate.About, simulate.Examples)
	command := simulate.NewCommand(f.FlagSet)
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	err := command.Run(ctx, os.Stdout)
	if errors.Is(err, status.ErrInvalid) {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	return err
}
