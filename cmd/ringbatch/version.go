// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"runtime"

	"github.com/ringbatch/ringbatch"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/shm"
)

func runVersion(_ context.Context, args []string) error {
	f := flags("version", "", "Print the version.", "")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	fmt.Printf("ringbatch %s (layout %d, control %d, %s %s/%s)\n", ringbatch.Version(), shm.LayoutVersion, control.Version,
		runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return nil
}
