// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/internal/policyflag"
	"github.com/spf13/pflag"
)

// About and Examples are parts of the command's help.
const (
	About = `How many workers does a load need, with which max_batch_size, and what will that give? With a MODEL it measures
how long batches of the running model take, by their rows and by the number of busy workers; meanwhile the
model's wait_time is 0. Then it drives the broker's batcher with a virtual clock. Without a MODEL, --cost says
how long batches take, and nothing else is needed or run. The same flags and costs always give the same result.
Several numbers of --workers or --batch-sizes are compared in a table.`

	Examples = `  # measure a running model, and compare 1 to 4 workers and its batch sizes under 2,000 requests/s
  ringbatch simulate resnet50 --rate 2000 --latency-goal 20ms

  # the same without the model, from its costs on an H200
  ringbatch simulate --rate 2000 --cost 1=3.3ms,32=8.2ms --workers 1,2,3 --sharing 0.48

  # one setting in detail: 128 producers that wait for each answer
  ringbatch simulate --arrivals closed --clients 128 --workers 3 --sharing 0.48 --cost 1=3.3ms,32=8.2ms

  # bursts, a deadline of 30 ms, preferred sizes, and the result for a script
  ringbatch simulate --arrivals bursty --rate 6000 --on 50ms --off 100ms \
      --deadline 30ms --preferred-batch-sizes 8,16 --json

  # two priority levels: a tenth is urgent, the rest may be refused or aged
  ringbatch simulate --rate 3500 --priority share=0.1 \
      --priority share=0.9,max_queue=500,default_timeout=50ms --ageing 100ms

  # an encoder of texts that packs up to 8,192 tokens; batches cost by tokens
  ringbatch simulate --arrivals closed --clients 64 --workers 2 --tokens 8-500 --max-batch-size 128 \
      --max-batch-cost 8192 --cost 256=1ms,8192=4.2ms

  # a decoder: what do 32 lanes give, if a row takes about 24 rounds, and at most 256
  ringbatch simulate --arrivals closed --clients 64 --lanes 32 --rounds 24,0.75,256 --cost 1=1ms,32=1.2ms

  # two models that do not fit together, whose starts take seconds, and one that follows its load
  ringbatch simulate --gpu-memory 10 --share a,memory=6,start=8s,rate=5,on=20s,off=40s,idle=10s \
      --share b,memory=6,start=4s,rate=5,on=20s,off=40s,idle=10s --share c,memory=1,rate=60,goal=200ms,instances=1-4
`
)

// Command is `ringbatch simulate`, as its flags describe it.
type Command struct {
	arrivals          string
	rate              float64
	on, off           time.Duration
	clients, inFlight int
	think             time.Duration
	rows, tokens      string
	shapes            int
	deadline          time.Duration
	cost              string
	workers, sizes    []int // several: compare
	depth, lanes      int
	rounds            string
	sharing           float64
	pad               string
	hop               time.Duration
	policy            *policyflag.Flags
	levels            []string
	shares            []string // models that share a GPU; then only the next two, seed and json count
	gpuMemory         float64
	length            time.Duration
	requests          int
	seed              uint64
	json              bool
	measured          io.Reader // the costs of a running model
	set               *pflag.FlagSet
}

// NewCommand adds the command's flags to a set.
func NewCommand(s *pflag.FlagSet) *Command {
	c := &Command{set: s}
	s.StringVar(&c.arrivals, "arrivals", "poisson", "how requests come: poisson, bursty or closed")
	s.Float64Var(&c.rate, "rate", 1000, "poisson, bursty: `requests` per second (bursty: while on)")
	s.DurationVar(&c.on, "on", 100*time.Millisecond, "bursty: mean length of a burst")
	s.DurationVar(&c.off, "off", 100*time.Millisecond, "bursty: mean length of a pause")
	s.IntVar(&c.clients, "clients", 0,
		"closed: number of clients (default 32); otherwise requests come through as many in turn (default 64)")
	s.IntVar(&c.inFlight, "in-flight", 1, "closed: requests that each client keeps in flight")
	s.DurationVar(&c.think, "think", 0, "closed: mean pause of a client between answer and next request")
	s.StringVar(&c.rows, "rows", "1", "rows per request, a `number` or a range like 1-4")
	s.StringVar(&c.tokens, "tokens", "",
		"tokens per row, a `number` or a range like 8-500: the cost for max_batch_cost, and --cost is by tokens then")
	s.IntVar(&c.shapes, "shapes", 1, "number of different shapes; requests of different shapes share no batch")
	s.DurationVar(&c.deadline, "deadline", 0, "time budget of each request (0: none)")
	s.StringVar(&c.cost, "cost", "1=3.3ms,32=8.2ms",
		"time per batch size: `points` to interpolate, or a CSV file (rows, time, busy workers) of --out")
	s.IntSliceVar(&c.workers, "workers", []int{1}, "number of workers; several, `N,N…`, are compared (default for a MODEL: 1,2,3,4)")
	s.IntSliceVar(&c.sizes, "batch-sizes", nil, "values of max_batch_size to compare, `N,N…` (default for a MODEL: 1, 2, 4 … its own)")
	s.IntVar(&c.depth, "depth", 1, "batches that a worker may hold, running and prefetched")
	s.StringVar(&c.rounds, "rounds", "", "rounds of a row, log-normal: `MEDIAN,SIGMA`[,MOST]; --cost is the time of a round then")
	s.IntVar(&c.lanes, "lanes", 0, "with --rounds: `rows` that go round in a worker, each answered when it is done; beside whole batches")
	s.Float64Var(&c.sharing, "sharing", 0, "`share` of its time that each other busy worker adds to a batch, as on one GPU")
	s.StringVar(&c.pad, "pad", "", "pad batches to `rows`, or to the next preferred size (\"preferred\")")
	s.DurationVar(&c.hop, "hop", 7*time.Microsecond, "transport from one process to the next; a request takes three")
	c.policy = policyflag.Add(s, "max_batch_size", "max_batch_cost", "wait_time", "latency_goal", "preferred_batch_sizes",
		"default_priority", "ageing", "preserve_order")
	s.StringArrayVar(&c.levels, "priority", nil,
		"a priority level, most urgent first: `policy` of share=, max_queue=, default_timeout=, max_timeout=, on_timeout= (repeatable)")
	s.StringArrayVar(&c.shares, "share", nil, "a `MODEL` that shares a GPU with others, sleeps, and follows its load: "+
		"NAME,memory=GIB,start=,takes=,rate=,on=,off=,idle=,goal=,instances=0-4 (repeatable)")
	s.Float64Var(&c.gpuMemory, "gpu-memory", 80, "with --share: `GiB` of the GPU's budget")
	s.DurationVar(&c.length, "length", 10*time.Minute, "with --share: the time to simulate")
	s.IntVar(&c.requests, "requests", 100_000, "number of requests to simulate")
	s.Uint64Var(&c.seed, "seed", 1, "another seed is another run of chance")
	s.BoolVar(&c.json, "json", false, "print the result as JSON")
	return c
}

// Measured takes the costs of a running model, and compares its batch sizes, unless the flags say otherwise.
func (c *Command) Measured(costs io.Reader, maxBatchSize int) error {
	c.measured = costs
	if c.set.Changed("cost") {
		return bad("--cost and a MODEL exclude each other")
	}
	if !c.set.Changed("workers") {
		c.workers = []int{1, 2, 3, 4}
	}
	if !c.set.Changed("max-batch-size") && len(c.sizes) == 0 {
		for n := 1; n < maxBatchSize; n *= 2 {
			c.sizes = append(c.sizes, n)
		}
		c.sizes = append(c.sizes, maxBatchSize)
	}
	return nil
}

// checkTogether refuses flags that count only with --share, or only without.
func (c *Command) checkTogether() (err error) {
	c.set.Visit(func(f *pflag.Flag) {
		only, both := slices.Contains([]string{"gpu-memory", "length"}, f.Name), slices.Contains([]string{"share", "seed", "json"}, f.Name)
		if err == nil && !both && only != (len(c.shares) > 0) {
			err = bad("--%s goes %s --share", f.Name, map[bool]string{true: "with", false: "without"}[only])
		}
	})
	return err
}

// Run simulates, and writes the result. Its error wraps status.ErrInvalid if the flags, or
// the files that they name, make no sense.
func (c *Command) Run(ctx context.Context, stdout io.Writer) error {
	start := time.Now()
	if err := c.checkTogether(); err != nil {
		return err
	}
	if len(c.shares) > 0 {
		r, err := c.runShared(ctx)
		if err != nil {
			return err
		}
		return c.write(stdout, r, start)
	}
	cfg, err := c.config()
	if err != nil {
		return err
	}
	if len(c.workers) > 1 || len(c.sizes) > 0 {
		t, err := c.compare(ctx, cfg)
		if err != nil {
			return err
		}
		return c.write(stdout, t, start)
	}
	r, err := Run(ctx, cfg)
	if err != nil {
		return err
	}
	r.cfg = &cfg
	if cfg.Workers.Lanes > 0 {
		if r.Whole, err = runWhole(ctx, cfg); err != nil {
			return err
		}
	}
	return c.write(stdout, r, start)
}

// write writes a result for a person or for a script.
func (c *Command) write(stdout io.Writer, r interface{ WriteText(io.Writer) error }, start time.Time) error {
	if c.json {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	if err := r.WriteText(stdout); err != nil {
		return err
	}
	_, err := fmt.Fprintf(stdout, "\n(simulated in %v, seed %d)\n", time.Since(start).Round(time.Millisecond), c.seed)
	return err
}
