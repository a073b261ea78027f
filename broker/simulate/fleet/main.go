// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/broker/simulate"
	"github.com/ringbatch/ringbatch/internal/svgchart"
)

// Asked tells whether the arguments of `ringbatch simulate` are for many hosts.
func Asked(args []string) bool {
	return slices.ContainsFunc(args, func(a string) bool { return a == "--hosts" || strings.HasPrefix(a, "--hosts=") })
}

const usage = `Usage: ringbatch simulate --hosts N [flags]

Drive the batchers of many hosts with a virtual clock: producers' hosts whose
relays choose a GPU host for each batch. See docs/scale.md.

Examples:
  ringbatch simulate --hosts 16 --rate 20000
  ringbatch simulate --hosts 1000 --fronts 100 --rate 1000000 --requests 10000000 --route least_request
  ringbatch simulate --hosts 16 --plots docs/images      # the pictures of docs/scale.md

Flags:
`

// Main is the command; it returns the exit code.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	f := pflag.NewFlagSet("simulate", pflag.ContinueOnError)
	f.SetOutput(io.Discard)
	f.SortFlags = false
	var cfg Config
	var route, cost, plots string
	var asJSON bool
	f.IntVar(&cfg.Hosts, "hosts", 0, "GPU hosts")
	f.StringVar(&route, "route", "all", "how relays choose: random, round_robin, two_choices, least_request, weighted, fill, or all of them")
	f.IntVar(&cfg.Fronts, "fronts", 8, "producers' hosts, with a relay each")
	f.IntVar(&cfg.Workers, "workers", 1, "workers of each GPU host")
	f.Float64Var(&cfg.Rate, "rate", 10_000, "requests a second, of all fronts")
	f.IntVar(&cfg.Requests, "requests", 200_000, "number of requests to simulate")
	f.IntVar(&cfg.MaxBatch, "max_batch_size", 32, "rows of a batch")
	f.DurationVar(&cfg.Wait, "wait_time", 2*time.Millisecond, "how long a front waits for others to batch with")
	f.StringVar(&cost, "cost", "1=3.3ms,32=8.2ms", "time per batch size, as points between which it is interpolated")
	f.DurationVar(&cfg.Network, "network", 100*time.Microsecond, "delay from host to host, one way")
	f.DurationVar(&cfg.Stale, "stale", 100*time.Millisecond, "how often hosts report their load (0: it is always known)")
	f.Float64Var(&cfg.Failures, "failures", 0, "failures of each host, an hour")
	f.DurationVar(&cfg.Outage, "outage", 30*time.Second, "how long each of them lasts")
	f.DurationVar(&cfg.Detect, "detect", time.Second, "how long until a relay gives up what a host had")
	f.IntVar(&cfg.Window, "window", 2, "batches that one relay has at one host at most")
	f.Uint64Var(&cfg.Seed, "seed", 1, "another seed is another run of chance")
	f.BoolVar(&asJSON, "json", false, "print the results as JSON")
	f.StringVar(&plots, "plots", "", "instead: every route at rising load, as pictures in this folder, which is made if need be")
	fail := func(code int, err error) int {
		fmt.Fprintln(stderr, "ringbatch simulate:", err)
		return code
	}
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			fmt.Fprint(stdout, usage, f.FlagUsages())
			return 0
		}
		return fail(2, fmt.Errorf("%w; with --hosts see ringbatch simulate --hosts 1 --help", err))
	}
	if f.NArg() > 0 {
		return fail(2, fmt.Errorf("no arguments are taken, got %q", f.Arg(0)))
	}
	var err error
	if cfg.Cost, err = simulate.ParseCost(cost); err != nil {
		return fail(2, err)
	}
	routes := []Route{Route(route)}
	if route == "all" {
		routes = Routes()
	}
	if plots != "" {
		for _, name := range []string{"route", "rate", "json"} {
			if f.Changed(name) {
				return fail(2, fmt.Errorf("%w: --%s is not for --plots, which draws every route at rising load", simulate.ErrConfig, name))
			}
		}
		if err := plot(ctx, cfg, plots); errors.Is(err, simulate.ErrConfig) {
			return fail(2, err)
		} else if err != nil {
			return fail(1, err)
		}
		return 0
	}
	var results []*Result
	for _, r := range routes {
		cfg.Route = r
		began := time.Now()
		result, err := Run(ctx, cfg)
		if err != nil {
			return fail(2, err)
		}
		results = append(results, result)
		if !asJSON {
			if len(results) == 1 {
				fmt.Fprintf(stdout, "%-14s %9s %9s %9s %8s %13s %7s %7s %8s\n", "route", "mean ms", "p50 ms", "p99 ms", "batch", "GPU-s/million", "used", "hosts", "resent")
			}
			fmt.Fprintf(stdout, "%-14s %9.2f %9.2f %9.2f %8.1f %13.0f %6.0f%% %7.1f %8d   (%.1f s)\n", r, result.MeanMS, result.P50MS, result.P99MS, result.MeanBatch, result.GPUSeconds, 100*result.Utilization, result.HostsUsed, result.Resent, time.Since(began).Seconds())
		}
	}
	if asJSON {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		if err := e.Encode(results); err != nil {
			return fail(1, err)
		}
	}
	return 0
}

// plot draws every route at rising load.
func plot(ctx context.Context, cfg Config, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { // before it takes minutes
		return err
	}
	full := float64(cfg.Hosts*cfg.Workers*cfg.MaxBatch) / cfg.Cost.Of(cfg.MaxBatch).Seconds()
	shares := []float64{0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9}
	charts := map[string]*svgchart.Chart{
		"p99":  {Title: "p99 latency", XLabel: "load, share of what full batches could do", YLabel: "ms", YLog: true},
		"gpu":  {Title: "GPU-seconds per million requests", XLabel: "load, share of what full batches could do", YLabel: "seconds"},
		"used": {Title: "hosts that run anything, in the mean second", XLabel: "load, share of what full batches could do", YLabel: "hosts"},
	}
	for _, r := range Routes() {
		lines := map[string]*svgchart.Line{}
		for name := range charts {
			lines[name] = &svgchart.Line{Name: string(r)}
		}
		for _, share := range shares {
			cfg.Route, cfg.Rate = r, share*full
			result, err := Run(ctx, cfg)
			if err != nil {
				return err
			}
			for name, y := range map[string]float64{"p99": result.P99MS, "gpu": result.GPUSeconds, "used": result.HostsUsed} {
				lines[name].X, lines[name].Y = append(lines[name].X, share), append(lines[name].Y, y)
			}
		}
		for name, c := range charts {
			c.Lines = append(c.Lines, *lines[name])
		}
	}
	for name, c := range charts {
		figure := svgchart.Figure{Title: fmt.Sprintf("%d hosts, %d relays, reports every %v", cfg.Hosts, cfg.Fronts, cfg.Stale), Charts: []svgchart.Chart{*c}}
		file, err := os.Create(filepath.Join(dir, "scale-"+name+".svg"))
		if err != nil {
			return err
		}
		err = errors.Join(figure.Render(file), file.Close())
		if err != nil {
			return err
		}
	}
	return nil
}
