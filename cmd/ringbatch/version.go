// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"fmt"
	"os"
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
	_, err := fmt.Printf("ringbatch %s (layout %d, control %d, %s %s/%s)\n", ringbatch.Version(), shm.LayoutVersion, control.Version,
		runtime.Version(), runtime.GOOS, runtime.GOARCH)
	return err
}

// licenses are the licences of the linked modules, which must accompany the binary. Written
// by hack/licences.py.
//
//go:embed licenses.txt
var licenses string

func runLicenses(_ context.Context, args []string) error {
	f := flags("licenses", "", "Print the licences of the software that this command contains.", "")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	_, err := os.Stdout.WriteString(licenses)
	return err
}
