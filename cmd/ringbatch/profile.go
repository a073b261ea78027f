// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/feed"
	"github.com/ringbatch/ringbatch/tools/profile"
	"github.com/ringbatch/ringbatch/tools/svgchart"
)

// interrupted is the exit status after Ctrl-C, as shells have it.
const interrupted = exitCode(130)

func runProfile(ctx context.Context, args []string) error {
	f := flags("profile", " MODEL", `Measure how long batches of a running model take, by their rows and by the number of busy workers.
While it measures, the model's wait_time is 0. Ctrl-C keeps the results so far.`,
		`  ringbatch profile resnet50 --out resnet50.csv
  ringbatch profile resnet50 --in x=images.npy --sizes 1,8,16,32 --busy 1,3
  ringbatch simulate --cost resnet50.csv --rate 2000 --workers 3
`)
	socket := socketFlag(f)
	inputs := addFeedFlags(f)
	sizes := f.IntSlice("sizes", nil, "batch sizes `N,N…`, in rows (default: 1, 2, 4 … max_batch_size)")
	busy := f.IntSlice("busy", nil, "numbers of busy workers, `N,N…` (default: 1, 2, 4 … all)")
	length := f.Duration("duration", 15*time.Second, "about how long to measure; slow models take longer, for a few batches of "+
		"each kind")
	out := f.String("out", "", "write the cost file that ringbatch simulate --cost reads (CSV)")
	asJSON := f.Bool("json", false, "print JSON")
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	if *length <= 0 || *length > time.Hour {
		return fmt.Errorf("%w: --duration is %v, must be more than 0 and at most 1h", errUsage, *length)
	}
	if err := progress.CanWrite(*out); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	if err := inputs.check(); err != nil {
		return err
	}
	say := progress.New()
	p, err := profile.Measure(ctx, profile.Options{
		Socket: *socket, Model: f.Arg(0), Feed: inputs.feed, Sizes: *sizes, Busy: *busy,
		Time: *length, Patience: profile.UsualPatience,
		Progress: func(share float64, doing string) { say.Say("%3.0f %%  %s", 100*share, doing) },
	})
	say.Clear()
	if p == nil || len(p.Points) == 0 {
		if errors.Is(err, context.Canceled) {
			fmt.Fprintln(os.Stderr, "ringbatch: interrupted before anything was measured")
			return interrupted
		}
		return inputs.explain(err)
	}
	if writeErr := writeProfile(p, *out, *asJSON); writeErr != nil {
		return writeErr
	}
	if errors.Is(err, context.Canceled) {
		return interrupted
	}
	return inputs.explain(err)
}

// writeProfile writes the results, even of an interrupted run. It prints them even if the
// file cannot be written.
func writeProfile(p *profile.Profile, out string, asJSON bool) error {
	var failed error
	if out != "" {
		if err := writeFile(out, p.WriteCost); err != nil {
			failed = fmt.Errorf("--out: %w", err)
		}
	}
	if asJSON {
		return errors.Join(failed, json.NewEncoder(os.Stdout).Encode(struct {
			*profile.Profile
			Verdict string `json:"verdict"`
		}{p, p.Verdict()}))
	}
	return errors.Join(failed, p.WriteText(os.Stdout))
}

func writeFile(path string, write func(io.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := write(file); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}

func writeFigure(path string, figure *svgchart.Figure) error {
	if err := writeFile(path, figure.Render); err != nil {
		return fmt.Errorf("--svg: %w", err)
	}
	return nil
}

// feedFlags choose the inputs of requests that only load a model.
type feedFlags struct{ files *[]string }

func addFeedFlags(f *flagSet) *feedFlags {
	return &feedFlags{f.StringArray("in", nil,
		"rows of an input, `NAME=FILE.npy` (repeatable; default: made from the signature, variable dimensions at their largest)")}
}

// explain adds a likely cause to the error of a failed batch.
func (g *feedFlags) explain(err error) error {
	var failed *profile.BatchError
	if len(*g.files) > 0 || !errors.As(err, &failed) {
		return err
	}
	return fmt.Errorf("%w\nits inputs were random numbers, made from the signature: --in NAME=FILE.npy sends your own", err)
}

// check checks the flags and files before the model is there, which may take minutes.
func (g *feedFlags) check() error {
	var names []string
	for _, text := range *g.files {
		name, path, ok := strings.Cut(text, "=")
		if !ok {
			return fmt.Errorf("%w: --in %s: want NAME=FILE.npy", errUsage, text)
		}
		if slices.Contains(names, name) {
			return fmt.Errorf("%w: --in %s: there is a file for %s already", errUsage, text, name)
		}
		names = append(names, name)
		file, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("--in %s: %w", text, err)
		}
		_ = file.Close()
	}
	return nil
}

func (g *feedFlags) feed(sig *tensor.Signature) (*feed.Feed, error) {
	var given []tensor.Tensor
	for _, text := range *g.files {
		name, file, _ := strings.Cut(text, "=")
		spec := &tensor.Spec{Name: name}
		for i := range sig.Inputs {
			if sig.Inputs[i].Name == name {
				spec = &sig.Inputs[i]
			}
		}
		t, err := readInput(spec, file)
		if err != nil {
			return nil, err
		}
		if t.Shape == nil {
			return nil, fmt.Errorf("%w: --in %s: not an .npy file", status.ErrInvalid, text)
		}
		given = append(given, t)
	}
	return feed.New(sig, given, 1)
}
