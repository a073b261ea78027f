// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/typo"
	"github.com/ringbatch/ringbatch/tensor"
)

func runAlias(ctx context.Context, args []string) error {
	f := flags("alias", " [NAME [MODEL | MODEL=PERCENT…]]",
		`Route a name to a model. Clients attach to the name and follow by themselves when it changes: no request
is lost. With several models, a gateway gives each its share of the requests, and clients on this host get
the model with the largest share. Without arguments, list the aliases.`,
		`  ringbatch alias resnet resnet@1                        # clients of resnet get resnet@1
  ringbatch alias resnet resnet@1=90 resnet@2=10         # a canary for a gateway's callers
  ringbatch alias resnet resnet@2 --save                 # the switch
  ringbatch alias resnet --remove
`)
	socket, save := socketFlag(f), saveFlag(f)
	remove := f.Bool("remove", false, "remove the alias; attached clients keep their model")
	force := f.Bool("force", false, "even if a model has no worker that answers")
	if err := parse(f, args, 0, -1); err != nil {
		return err
	}
	a := admin.New(*socket)
	switch {
	case f.NArg() <= 1 && !*remove:
		return listAliases(ctx, a, f.Arg(0))
	case *remove && f.NArg() != 1:
		return fmt.Errorf("%w: --remove takes the name of one alias", errUsage)
	case *remove:
		if err := a.RemoveAlias(ctx, f.Arg(0), *save); err != nil {
			return err
		}
		fmt.Println("removed")
		return nil
	}
	next, err := alias.Parse(f.Arg(0), f.Args()[1:]...)
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if !*force {
		var models []string
		for _, t := range next.To {
			models = append(models, t.Model)
		}
		if err := a.Ready(ctx, models...); err != nil {
			return fmt.Errorf("nothing changed: %w (--force does it anyway)", err)
		}
	}
	if err := a.SetAlias(ctx, next, *save); err != nil {
		return err
	}
	fmt.Println("changed")
	return nil
}

func listAliases(ctx context.Context, a *admin.Client, only string) error {
	list, err := a.Aliases(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, line := range list {
		names = append(names, line.Name)
	}
	switch {
	case only != "" && !slices.Contains(names, only):
		return fmt.Errorf("there is no alias %q%s", only, typo.DidYouMean(only, names))
	case len(names) == 0:
		fmt.Println("no aliases")
		return nil
	}
	name := func(text string) string { return printable.Text(text, tensor.MaxNameBytes) }
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "alias\tmodel\tshare\tclients")
	for _, line := range list {
		for i, t := range line.To {
			if only == "" || line.Name == only {
				fmt.Fprintf(w, "%s\t%s\t%s\t%d\n", name(line.Name), name(t.Model), t.Share, line.Clients[i])
			}
		}
	}
	return w.Flush()
}
