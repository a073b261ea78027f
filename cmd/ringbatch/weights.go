// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/typo"
)

// loadCommand publishes a file.
const loadCommand = "python -m ringbatch weights load MODEL FILE"

func runWeights(ctx context.Context, args []string) error {
	f := flags("weights", " [MODEL]",
		`Show the live weights of models: the version in force, its age, and the version of each worker. With --withdraw,
withdraw the latest version: workers go on with the one before. Python publishes a file, see the last example.`,
		`  ringbatch weights
  ringbatch weights policy --withdraw
  `+loadCommand+`
`)
	socket := socketFlag(f)
	withdraw := f.Bool("withdraw", false, "withdraw the latest version")
	asJSON := f.Bool("json", false, "print JSON")
	if err := parse(f, args, 0, -1); err != nil {
		return err
	}
	a, model := admin.New(*socket), f.Arg(0)
	if f.NArg() > 1 || *withdraw && model == "" {
		return fmt.Errorf("%w: weights takes one MODEL; a file is published by %s", errUsage, loadCommand)
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
		fmt.Fprintln(out, "no model has live weights; publish some with rb.publisher in Python, or "+loadCommand)
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
