// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/ringbatch/ringbatch/tools/simulate"
)

// runSimulate gives simulate's flags the spelling of the other commands: dashes, and --svg
// for --plot.
func runSimulate(ctx context.Context, args []string) error {
	args = slices.Clone(args)
	for i, arg := range args {
		if arg == "--svg" || strings.HasPrefix(arg, "--svg=") {
			args[i] = "--plot" + strings.TrimPrefix(arg, "--svg")
		}
	}
	var help bytes.Buffer
	var out io.Writer = os.Stdout
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		out = &help
	}
	code := simulate.Main(ctx, args, out, os.Stderr)
	text := strings.NewReplacer("--plot file ", "--svg file  ", "--plot", "--svg").Replace(kebab(help.String()))
	if _, err := fmt.Print(text); err != nil {
		return err
	}
	if code != 0 {
		return exitCode(code)
	}
	return nil
}
