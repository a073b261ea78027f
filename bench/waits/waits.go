// SPDX-License-Identifier: Apache-2.0

// Package waits compares wait_time "auto" with fixed waits in the simulator, in cells that a seed draws.
package waits

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/internal/progress"
)

const about = `Compare wait_time auto with fixed waits, simulated, in 380 cells that --seed draws: some minutes.`

// Run is `bench waits`.
func Run(ctx context.Context, args []string, out io.Writer) error {
	f := pflag.NewFlagSet("bench waits", pflag.ContinueOnError)
	f.SortFlags = false
	seed := f.Uint64("seed", 1, "another seed draws other cells")
	path := f.String("json", "", "write the results to this file")
	f.Usage = func() { fmt.Fprintf(os.Stderr, "%s\n\n%s", about, f.FlagUsages()) }
	if err := f.Parse(args); errors.Is(err, pflag.ErrHelp) {
		return nil
	} else if err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("%q: bench waits takes flags only; see --help", f.Arg(0))
	}
	if err := progress.CanWrite(*path); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	result, err := runGrid(ctx, *seed)
	if err != nil {
		return err
	}
	if err := result.WriteText(out); err != nil || *path == "" {
		return err
	}
	return rig.WriteJSON(*path, result)
}

func runGrid(ctx context.Context, seed uint64) (*GridResult, error) {
	cells, err := gridCells(seed, 1)
	if err != nil {
		return nil, err
	}
	line := progress.New()
	results, err := runGridCells(ctx, cells, func(done int) { line.Say("%d of %d cells", done, len(cells)) })
	line.Clear()
	return newGridResult(seed, results), err
}
