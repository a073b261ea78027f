// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/policy"
)

// config makes a Config of the flags; errors name the flag.
func (c *Command) config() (cfg Config, err error) {
	cfg = Config{
		Load:     Load{Deadline: c.deadline, Shapes: c.shapes},
		Workers:  Workers{Count: slices.Max(append([]int{0}, c.workers...)), Depth: c.depth, Sharing: c.sharing},
		Hop:      c.hop,
		Requests: c.requests,
		Seed:     c.seed,
	}
	if len(c.workers) == 0 || slices.Min(c.workers) < 1 || c.depth < 1 || c.shapes < 1 || c.inFlight < 1 {
		return cfg, bad("--workers, --depth, --in-flight and --shapes must be at least 1")
	}
	for _, step := range []func(*Config) error{c.setArrivals, c.setRows, c.setCost, c.setPolicy, c.setPadding, c.setRounds} {
		if err := step(&cfg); err != nil {
			return cfg, err
		}
	}
	return cfg, nil
}

func (c *Command) setArrivals(cfg *Config) error {
	switch c.arrivals {
	case "poisson":
		cfg.Arrivals = Poisson{Rate: c.rate, Clients: c.clients}
	case "bursty":
		cfg.Arrivals = Bursty{Rate: c.rate, On: c.on, Off: c.off, Clients: c.clients}
	case "closed":
		cfg.Arrivals = ClosedLoop{Clients: or(c.clients, 32), InFlight: c.inFlight, Think: c.think}
	default:
		return bad("--arrivals is %q, must be poisson, bursty or closed", c.arrivals)
	}
	return nil
}

func (c *Command) setRows(cfg *Config) error {
	var err error
	if cfg.Load.MinRows, cfg.Load.MaxRows, err = parseRange(c.rows); err != nil {
		return bad("--rows is %q, must be a number or a range like 1-4", c.rows)
	}
	if c.tokens == "" {
		return nil
	}
	if cfg.Load.MinTokens, cfg.Load.MaxTokens, err = parseRange(c.tokens); err != nil {
		return bad("--tokens is %q, must be a number or a range like 8-500", c.tokens)
	}
	return nil
}

// parseRange reads a number from 1 on, or a range of them like 1-4.
func parseRange(text string) (low, high int, err error) {
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	low, err1 := strconv.Atoi(first)
	high, err2 := strconv.Atoi(last)
	return low, high, cmp.Or(err1, err2, need(low >= 1, "%d is below 1", low))
}

// setCost reads points, or the file of them that --cost names.
func (c *Command) setCost(cfg *Config) (err error) {
	if c.measured != nil {
		cfg.Cost, cfg.Busy, err = ReadCosts(c.measured)
		return err
	}
	if strings.Contains(c.cost, "=") {
		if cfg.Cost, err = ParseCost(c.cost); err != nil {
			return fmt.Errorf("--cost: %w", err)
		}
		return nil
	}
	file, err := os.Open(c.cost)
	if err != nil {
		return fmt.Errorf("--cost: neither points like 1=3.3ms,32=8.2ms nor a file: %w", err)
	}
	defer file.Close()
	if cfg.Cost, cfg.Busy, err = ReadCosts(file); err != nil {
		return fmt.Errorf("--cost: %w", err)
	}
	return nil
}

func (c *Command) setPadding(cfg *Config) error {
	switch c.pad {
	case "":
	case "preferred":
		cfg.Workers.Pad = batcher.PadPreferred
	default:
		rows, err := strconv.Atoi(c.pad)
		if err != nil || rows < cfg.Policy.MaxBatchSize {
			return bad("--pad is %q, must be preferred, or rows of at least --max-batch-size", c.pad)
		}
		cfg.Workers.Pad, cfg.Workers.PadTo = batcher.PadFixed, rows
	}
	return nil
}

func (c *Command) setPolicy(cfg *Config) error {
	p, err := c.policy.Policy()
	if err != nil {
		return err
	}
	given := 0
	for i, text := range c.levels {
		share, err := setLevel(p, i, text)
		if err != nil {
			return err
		}
		if share >= 0 {
			given++
		}
		cfg.Load.LevelShares = append(cfg.Load.LevelShares, share)
	}
	if given != 0 && given != len(c.levels) {
		return bad("--priority: give a share= to every level or to none")
	}
	if given == 0 {
		cfg.Load.LevelShares = nil
	}
	if len(c.levels) > 0 {
		p["priorities"] = strconv.Itoa(len(c.levels))
	}
	if cfg.Policy, err = p.Resolve(nil); err != nil {
		return err
	}
	return nil
}

// setLevel reads "share=0.9,max_queue=500,on_timeout=delay" into level i of a policy. The share is -1 if
// none is given.
func setLevel(p policy.Policy, i int, text string) (share float64, err error) {
	share = -1
	for _, option := range strings.Split(text, ",") {
		key, value, _ := strings.Cut(option, "=")
		if key != "share" {
			p[fmt.Sprintf("%s.%d", key, i)] = value
			continue
		}
		if share, err = strconv.ParseFloat(value, 64); err != nil || !(share >= 0) {
			return share, bad("--priority %q: a share is a number, at least 0", text)
		}
	}
	return share, nil
}
