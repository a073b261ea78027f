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
	"time"

	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/spf13/pflag"
)

// About and Examples are parts of the command's help.
const (
	About = `Drive the broker's batcher with a virtual clock: what would a policy do to a load, on a model whose batches
take a given time? Nothing else is needed or run. The same flags always give the same result.`

	Examples = `  # 2,000 requests a second, one worker, ResNet-50 as measured on an H200
  ringbatch simulate --rate 2000 --cost 1=3.3ms,32=8.2ms --wait-time 2ms

  # 128 producers that wait for each answer, three workers that share the GPU, and a picture
  ringbatch simulate --arrivals closed --clients 128 --workers 3 --sharing 0.48 \
      --cost 1=3.3ms,32=8.2ms --svg closed.svg

  # bursts, a deadline of 30 ms, preferred sizes, and the result for a script
  ringbatch simulate --arrivals bursty --rate 6000 --on 50ms --off 100ms \
      --deadline 30ms --preferred-batch-sizes 8,16 --json

  # two priority levels: a tenth is urgent, the rest may be refused or aged
  ringbatch simulate --rate 3500 --priority share=0.1 \
      --priority share=0.9,max_queue=500,default_timeout=50ms --ageing 100ms

  # an encoder of texts that packs up to 8,192 tokens; batches cost by tokens
  ringbatch simulate --arrivals closed --clients 64 --workers 2 --tokens 8-500 --max-batch-size 128 \
      --max-batch-cost 8192 --cost 256=1ms,8192=4.2ms

  # a recorded load and measured costs
  ringbatch simulate --trace requests.txt --cost costs.csv

  # how good is wait_time auto, in cells drawn by a seed? Takes some minutes
  ringbatch simulate --grid --seed 7
`
)

// Command is `ringbatch simulate`, as its flags describe it.
type Command struct {
	arrivals          string
	rate              float64
	on, off           time.Duration
	clients, inFlight int
	think             time.Duration
	trace             string
	rows, tokens      string
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
	svg               string
	grid              bool
	sweep             bool
	set               *pflag.FlagSet
}

// NewCommand adds the command's flags to a set.
func NewCommand(s *pflag.FlagSet) *Command {
	c := &Command{set: s}
	s.StringVar(&c.arrivals, "arrivals", "poisson", "how requests come: poisson, bursty, closed or trace")
	s.Float64Var(&c.rate, "rate", 1000, "poisson, bursty: `requests` per second (bursty: while on)")
	s.DurationVar(&c.on, "on", 100*time.Millisecond, "bursty: mean length of a burst")
	s.DurationVar(&c.off, "off", 100*time.Millisecond, "bursty: mean length of a pause")
	s.IntVar(&c.clients, "clients", 0,
		"closed: number of clients (default 32); otherwise requests come through as many in turn (default 64)")
	s.IntVar(&c.inFlight, "in-flight", 1, "closed: requests that each client keeps in flight")
	s.DurationVar(&c.think, "think", 0, "closed: mean pause of a client between answer and next request")
	s.StringVar(&c.trace, "trace", "", "replay a `file` with lines of: seconds rows [level]")
	s.StringVar(&c.rows, "rows", "1", "rows per request, a `number` or a range like 1-4")
	s.StringVar(&c.tokens, "tokens", "",
		"tokens per row, a `number` or a range like 8-500: the cost for max_batch_cost, and --cost is by tokens then")
	s.IntVar(&c.shapes, "shapes", 1, "number of different shapes; requests of different shapes share no batch")
	s.DurationVar(&c.deadline, "deadline", 0, "time budget of each request (0: none)")
	s.StringArrayVar(&c.stages, "stage", nil,
		"a further stage of a pipeline, as `COST; KEY=VALUE; …`: its --cost, workers, depth and settings (repeatable)")
	s.StringVar(&c.cost, "cost", "1=3.3ms,32=8.2ms",
		"time per batch size: `points` to interpolate, or a CSV file (rows, time, busy workers) of ringbatch profile --out")
	s.IntVar(&c.workers, "workers", 1, "number of workers")
	s.IntVar(&c.depth, "depth", 1, "batches that a worker may hold, running and prefetched")
	s.Float64Var(&c.sharing, "sharing", 0, "`share` of its time that each other busy worker adds to a batch, as on one GPU")
	s.StringVar(&c.pad, "pad", "", "pad batches to `rows`, or to the next preferred size (\"preferred\")")
	s.DurationVar(&c.hop, "hop", 7*time.Microsecond, "transport from one process to the next; a request takes three")
	c.policy = policyflag.Add(s, "max_batch_size", "max_batch_cost", "wait_time", "latency_goal", "preferred_batch_sizes",
		"default_priority", "ageing", "preserve_order")
	s.StringArrayVar(&c.levels, "priority", nil,
		"a priority level, most urgent first: `policy` of share=, max_queue=, default_timeout=, max_timeout=, on_timeout= (repeatable)")
	s.IntVar(&c.requests, "requests", 100_000, "number of requests to simulate")
	s.Uint64Var(&c.seed, "seed", 1, "another seed is another run of chance")
	s.BoolVar(&c.json, "json", false, "print the result as JSON")
	s.StringVar(&c.svg, "svg", "", "draw latencies and batch sizes into an SVG `file`")
	s.BoolVar(&c.grid, "grid", false, "compare wait_time auto, latency_goal and deadlines with fixed waits in cells that --seed draws")
	s.BoolVar(&c.sweep, "sweep", false, "mean latency by load for wait_time auto and fixed waits, as a table, and as a picture with --svg")
	return c
}

// Run simulates, and writes the result. Its error wraps status.ErrInvalid if the flags, or
// the files that they name, make no sense.
func (c *Command) Run(ctx context.Context, stdout io.Writer) error {
	if err := progress.CanWrite(c.svg); err != nil {
		return fmt.Errorf("--svg: %w", err)
	}
	switch {
	case c.grid:
		return c.runGrid(ctx, stdout)
	case c.sweep:
		return c.runSweep(ctx, stdout)
	}
	cfg, err := c.config()
	if err != nil {
		return err
	}
	start := time.Now()
	r, err := Run(ctx, cfg)
	if err != nil {
		return err
	}
	return c.write(stdout, r, &cfg, time.Since(start))
}

func (c *Command) runGrid(ctx context.Context, stdout io.Writer) error {
	used := []string{"grid", "seed", "json"}
	if err := c.rejectUnused("--grid", func(flag string) bool { return slices.Contains(used, flag) }); err != nil {
		return err
	}
	cells, err := gridCells(c.seed, 1)
	if err != nil {
		return err
	}
	line := progress.New()
	results, err := runGridCells(ctx, cells, func(done int) { line.Say("%d of %d cells", done, len(cells)) })
	line.Clear()
	if err != nil {
		return err
	}
	g := newGridResult(c.seed, results)
	if c.json {
		return writeJSON(stdout, g)
	}
	return g.WriteText(stdout)
}

// rejectUnused names a given flag that this kind of run does not use.
func (c *Command) rejectUnused(run string, uses func(flag string) bool) (err error) {
	c.set.Visit(func(flag *pflag.Flag) {
		if !uses(flag.Name) && err == nil {
			err = bad("%s takes no --%s", run, flag.Name)
		}
	})
	return err
}

// write shows the result even if it cannot be drawn.
func (c *Command) write(stdout io.Writer, r *Result, cfg *Config, took time.Duration) error {
	var undrawn error
	if c.svg != "" {
		undrawn = writeFile(c.svg, func(w io.Writer) error { return r.WriteSVG(w, cfg) })
	}
	if c.json {
		return errors.Join(undrawn, writeJSON(stdout, r))
	}
	if err := r.WriteText(stdout, cfg); err != nil {
		return errors.Join(undrawn, err)
	}
	_, err := fmt.Fprintf(stdout, "\n(simulated in %v, seed %d)\n", took.Round(time.Millisecond), c.seed)
	return errors.Join(undrawn, err)
}

func writeJSON(w io.Writer, x any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(x)
}

// writeFile makes a file, and has render fill it.
func writeFile(name string, render func(io.Writer) error) error {
	file, err := os.Create(name)
	if err != nil {
		return fmt.Errorf("--svg: %w", err)
	}
	if err := errors.Join(render(file), file.Close()); err != nil {
		return fmt.Errorf("--svg %s: %w", name, err)
	}
	return nil
}
