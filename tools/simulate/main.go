// SPDX-License-Identifier: Apache-2.0

package simulate

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

	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// Exit codes of Main.
const (
	exitOK    = 0
	exitError = 1 // a file could not be read or written, or it was interrupted
	exitUsage = 2 // the flags, or what they name, make no sense
)

const usage = `Usage: ringbatch simulate [flags]

Drive the broker's batcher with a virtual clock: what would a policy do to a
load, on a model that takes so long per batch size? Nothing is run or needed but
the figures; the same flags always give the same result.

Examples:
  # 2,000 requests a second, one worker, ResNet-50 as measured on an H200
  ringbatch simulate --rate 2000 --cost 1=3.3ms,32=8.2ms --wait_time 2ms

  # 128 producers that wait for each answer, three workers that share the GPU,
  # and a picture of it
  ringbatch simulate --arrivals closed --clients 128 --workers 3 --sharing 0.48 \
      --cost 1=3.3ms,32=8.2ms --plot closed.svg

  # bursts, a deadline of 30 ms, preferred sizes, and the result for a script
  ringbatch simulate --arrivals bursty --rate 6000 --on 50ms --off 100ms \
      --deadline 30ms --preferred_batch_sizes 8,16 --json

  # two priority levels: a tenth is urgent, the rest may be refused or aged
  ringbatch simulate --rate 3500 --priority share=0.1 \
      --priority share=0.9,max_queue=500,default_timeout=50ms --ageing 100ms

  # a recorded load and measured costs
  ringbatch simulate --trace requests.txt --cost costs.csv

  # how good is wait_time auto, in cells drawn by a seed? Takes some minutes
  ringbatch simulate --grid --seed 7

Flags:
`

// flags are the parsed command line.
type flags struct {
	arrivals          string
	rate              float64
	on, off           time.Duration
	clients, inFlight int
	think             time.Duration
	trace             string
	rows              string
	shapes            int
	deadline          time.Duration
	cost              string
	stages            []string
	workers, depth    int
	sharing           float64
	pad               string
	hop               time.Duration
	policy            *policyflag.Flags
	levels            []string
	requests          int
	seed              uint64
	json              bool
	plot              string
	grid              bool
	sweep             bool
	help              bool
	set               *pflag.FlagSet
}

func newFlags() *flags {
	f := &flags{set: pflag.NewFlagSet("simulate", pflag.ContinueOnError)}
	f.set.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-")) // --wait_time is --wait-time
	})
	s := f.set
	s.SortFlags = false
	s.SetOutput(io.Discard)
	// The names are those of the configuration file; dashes do as well.
	s.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "-", "_"))
	})
	s.StringVar(&f.arrivals, "arrivals", "poisson", "how requests come: poisson, bursty, closed or trace")
	s.Float64Var(&f.rate, "rate", 1000, "poisson, bursty: `requests` per second (bursty: while on)")
	s.DurationVar(&f.on, "on", 100*time.Millisecond, "bursty: mean length of a burst")
	s.DurationVar(&f.off, "off", 100*time.Millisecond, "bursty: mean length of a pause")
	s.IntVar(&f.clients, "clients", 0, "closed: number of clients (default 32); otherwise the clients that requests come through in turn (default 64)")
	s.IntVar(&f.inFlight, "in_flight", 1, "closed: requests that each client keeps in flight")
	s.DurationVar(&f.think, "think", 0, "closed: mean pause of a client between answer and next request")
	s.StringVar(&f.trace, "trace", "", "replay a `file` with lines of: seconds rows [level]")
	s.StringVar(&f.rows, "rows", "1", "rows per request, a `number` or a range like 1-4")
	s.IntVar(&f.shapes, "shapes", 1, "number of different shapes; requests of different shapes share no batch")
	s.DurationVar(&f.deadline, "deadline", 0, "time budget of each request (0: none)")
	s.StringArrayVar(&f.stages, "stage", nil, "a further stage of a pipeline, as `COST; KEY=VALUE; …`: what a batch of it takes, as in --cost, its workers, depth, and settings other than those of the first; repeatable, in order")
	s.StringVar(&f.cost, "cost", "1=3.3ms,32=8.2ms", "time per batch size, as `points` between which it is interpolated, or the name of a CSV file of them: rows, then 8.2ms or seconds, then how many workers were busy; ringbatch profile writes one")
	s.IntVar(&f.workers, "workers", 1, "number of workers")
	s.IntVar(&f.depth, "depth", 1, "batches that a worker may hold, running and prefetched")
	s.Float64Var(&f.sharing, "sharing", 0, "`share` of its time that each other busy worker adds to a batch, as on one GPU")
	s.StringVar(&f.pad, "pad", "", "pad batches to `rows`, or to the next preferred size (\"preferred\")")
	s.DurationVar(&f.hop, "hop", 7*time.Microsecond, "transport from one process to the next; a request takes three")
	f.policy = policyflag.Add(s, "max_batch_size", "wait_time", "latency_goal", "preferred_batch_sizes", "default_priority", "ageing", "preserve_order")
	s.StringArrayVar(&f.levels, "priority", nil, "a priority level, most urgent first; `policy` of share=, max_queue=, default_timeout=, max_timeout=, on_timeout=reject|delay (repeat for each level)")
	s.IntVar(&f.requests, "requests", 100_000, "number of requests to simulate")
	s.Uint64Var(&f.seed, "seed", 1, "another seed is another run of chance")
	s.BoolVar(&f.json, "json", false, "print the result as JSON")
	s.StringVar(&f.plot, "plot", "", "draw latencies and batch sizes into an SVG `file`")
	s.BoolVar(&f.grid, "grid", false, "hold wait_time auto, latency_goal and deadlines against fixed waits in many cells that --seed draws, instead")
	s.BoolVar(&f.sweep, "sweep", false, "mean latency against load for wait_time auto and fixed waits, as a table, and with --plot as a picture")
	s.BoolVarP(&f.help, "help", "h", false, "show this text")
	return f
}

// Main is the command `ringbatch simulate`. It returns the exit code.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	f := newFlags()
	if err := f.set.Parse(args); err != nil {
		return usageError(stderr, err)
	}
	if f.help {
		fmt.Fprint(stdout, usage, f.set.FlagUsagesWrapped(100))
		return exitOK
	}
	if f.set.NArg() > 0 {
		return usageError(stderr, fmt.Errorf("unexpected argument %q", f.set.Arg(0)))
	}
	if err := progress.CanWrite(f.plot); err != nil {
		return failure(stderr, fmt.Errorf("--plot: %w", err))
	}
	if f.grid {
		if err := f.runGrid(ctx, stdout, stderr); err != nil {
			return failure(stderr, err)
		}
		return exitOK
	}
	if f.sweep {
		if err := f.runSweep(ctx, stdout); err != nil {
			return failure(stderr, err)
		}
		return exitOK
	}
	cfg, err := f.config()
	if err != nil {
		return failure(stderr, err)
	}
	start := time.Now()
	r, err := Run(ctx, cfg)
	if err != nil {
		return failure(stderr, err)
	}
	if err := f.write(stdout, r, &cfg, time.Since(start)); err != nil {
		return failure(stderr, err)
	}
	return exitOK
}

// runGrid is --grid.
func (f *flags) runGrid(ctx context.Context, stdout, stderr io.Writer) error {
	used := []string{"grid", "seed", "json"}
	if err := f.rejectUnused("--grid", func(flag string) bool { return slices.Contains(used, flag) }); err != nil {
		return err
	}
	cells, err := gridCells(f.seed, 1)
	if err != nil {
		return err
	}
	say, end := progressLine(stderr)
	results, err := runGridCells(ctx, cells, func(done int) { say("%d of %d cells", done, len(cells)) })
	end()
	if err != nil {
		return err
	}
	g := newGridResult(f.seed, results)
	if f.json {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		return e.Encode(g)
	}
	return g.WriteText(stdout)
}

// rejectUnused names a flag that was given and that this kind of run does not look at.
func (f *flags) rejectUnused(run string, uses func(flag string) bool) (err error) {
	f.set.Visit(func(flag *pflag.Flag) {
		if !uses(flag.Name) && err == nil {
			err = bad("%s takes no --%s", run, flag.Name)
		}
	})
	return err
}

func usageError(stderr io.Writer, err error) int {
	fmt.Fprintf(stderr, "ringbatch simulate: %v\nTry 'ringbatch simulate --help'.\n", err)
	return exitUsage
}

func failure(stderr io.Writer, err error) int {
	if errors.Is(err, ErrConfig) {
		return usageError(stderr, err)
	}
	fmt.Fprintf(stderr, "ringbatch simulate: %v\n", err)
	return exitError
}

// write shows the result also if it cannot be drawn.
func (f *flags) write(stdout io.Writer, r *Result, cfg *Config, took time.Duration) error {
	var undrawn error
	if f.plot != "" {
		undrawn = writePlot(f.plot, r, cfg)
	}
	if f.json {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		return errors.Join(undrawn, e.Encode(r))
	}
	if err := r.WriteText(stdout, cfg); err != nil {
		return errors.Join(undrawn, err)
	}
	_, err := fmt.Fprintf(stdout, "\n(simulated in %v, seed %d)\n", took.Round(time.Millisecond), f.seed)
	return errors.Join(undrawn, err)
}

func writePlot(name string, r *Result, cfg *Config) error {
	file, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	if err := r.WriteSVG(file, cfg); err != nil {
		file.Close()
		return fmt.Errorf("plot %s: %w", name, err)
	}
	if err := file.Close(); err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	return nil
}

// progressLine writes over one line of a terminal, and nothing elsewhere.
func progressLine(w io.Writer) (progress func(format string, a ...any), end func()) {
	file, ok := w.(*os.File)
	if ok {
		_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS)
		ok = err == nil
	}
	if !ok {
		return func(string, ...any) {}, func() {}
	}
	return func(format string, a ...any) { fmt.Fprintf(w, "\r"+format, a...) }, func() { fmt.Fprint(w, "\r\033[K") }
}
