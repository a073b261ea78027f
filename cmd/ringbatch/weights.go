// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/safetensors"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker/weights"
)

func runWeights(ctx context.Context, args []string) error {
	f := flags("weights", " [MODEL]",
		`Show the live weights of models: the version in force, its age, and the version of each worker. With --load,
publish a file as a new version. With --withdraw, withdraw the latest version: workers go on with the one before.`,
		`  ringbatch weights
  ringbatch weights policy --load policy.safetensors
  ringbatch weights policy --withdraw
`)
	socket := socketFlag(f)
	load := f.String("load", "", "publish the tensors of this safetensors `FILE`")
	withdraw := f.Bool("withdraw", false, "withdraw the latest version")
	asJSON := f.Bool("json", false, "print JSON")
	if err := parse(f, args, 0, 1); err != nil {
		return err
	}
	a, model := admin.New(*socket), f.Arg(0)
	switch {
	case *load != "" && *withdraw || model == "" && (*load != "" || *withdraw):
		return fmt.Errorf("%w: --load and --withdraw take a MODEL, one at a time", errUsage)
	case *load != "":
		version, err := publishFile(ctx, *socket, model, *load)
		if err == nil {
			fmt.Printf("%s has version %d\n", model, version)
		}
		return err
	}
	s, err := a.Stats(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, w := range s.Weights {
		names = append(names, w.Model)
	}
	if model != "" && !slices.Contains(names, model) {
		return fmt.Errorf("%q has no live weights: nothing was published%s", model, typo.DidYouMean(model, names))
	}
	list := slices.DeleteFunc(s.Weights, func(w stats.Weights) bool { return model != "" && w.Model != model })
	switch {
	case *withdraw:
		if err := a.Withdraw(ctx, model, list[0].Last); err != nil {
			return err
		}
		fmt.Printf("version %d of %s is withdrawn\n", list[0].Last, model)
		return nil
	case *asJSON:
		return json.NewEncoder(os.Stdout).Encode(list)
	}
	return printWeights(os.Stdout, list)
}

func printWeights(out io.Writer, list []stats.Weights) error {
	if len(list) == 0 {
		fmt.Fprintln(out, "no model has live weights; publish some with rb.publisher in Python, or --load")
		return nil
	}
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "model\tversion\tage\tMiB\tpublisher\tworkers (version)")
	for _, w := range list {
		var workers []string
		for _, f := range w.Followers {
			workers = append(workers, fmt.Sprintf("%s (%d)", cmp.Or(f.Name, fmt.Sprint(f.Pid)), f.Version))
		}
		publisher := "none now"
		if w.Publisher != 0 {
			publisher = fmt.Sprint(w.Publisher)
		}
		age := time.Duration(w.AgeS * float64(time.Second)).Round(time.Millisecond)
		fmt.Fprintf(t, "%s\t%d\t%v\t%.1f\t%s\t%s\n", w.Model, w.Version, age, float64(w.Bytes)/(1<<20), publisher,
			strings.Join(workers, ", "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, w := range list {
		if w.Withdrawn == w.Last && w.Last > 0 {
			fmt.Fprintf(out, "version %d of %s is withdrawn: %s\n", w.Withdrawn, w.Model, printable.Text(w.Reason, 200))
		}
	}
	return nil
}

// publishFile publishes the tensors of a file, in the order of their names.
func publishFile(ctx context.Context, socket, model, path string) (uint32, error) {
	file, err := safetensors.Open(path)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	defer file.Close()
	var specs []tensor.Spec
	names := slices.Sorted(maps.Keys(file.Tensors))
	for _, name := range names {
		t := file.Tensors[name]
		dtype, err := tensor.ParseDType(t.DType)
		if err != nil {
			return 0, fmt.Errorf("%s: %s: %w", path, name, err)
		}
		specs = append(specs, tensor.Spec{Name: name, DType: dtype, Shape: t.Shape})
	}
	p, err := weights.NewPublisher(ctx, model, specs, weights.WithSocket(socket), weights.WithName("ringbatch weights"))
	if err != nil {
		return 0, err
	}
	defer p.Close()
	b, err := p.Begin(ctx)
	if err != nil {
		return 0, err
	}
	for k, name := range names {
		if _, err := io.ReadFull(file.Reader(name), b.Tensor(k)); err != nil {
			return 0, fmt.Errorf("%s: %s: %w", path, name, err)
		}
	}
	v, err := p.Publish(b)
	return uint32(v), err
}
