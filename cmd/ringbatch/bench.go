// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/tools/load"
	"github.com/ringbatch/ringbatch/tools/profile"
)

func runBench(ctx context.Context, args []string) error {
	f := flags("bench", " MODEL", `Load a model that runs, and print throughput, latency and where the time went. Closed loop: each
client sends its next request when one is answered. With --rate, requests come at random (Poisson),
and latency counts from the time at which a request should have been sent. Ctrl-C prints the results
so far.`, `  ringbatch bench resnet50 --clients 64
  ringbatch bench resnet50 --rate 500 --duration 30s --in x=images.npy --json > result.json
`)
	l := load.Load{Patience: profile.UsualPatience}
	socket := socketFlag(f)
	inputs := addFeedFlags(f)
	f.IntVar(&l.Clients, "clients", 8, "connections, all of this process")
	f.IntVar(&l.InFlight, "in-flight", 0, "requests that each client has in flight, at most with --rate (default 1; with --rate "+
		"64, or as many as fit)")
	f.IntVar(&l.Rows, "rows", 1, "rows per request")
	f.Float64Var(&l.Rate, "rate", 0, "open loop: requests per second of all clients together (default: closed loop)")
	length := f.Duration("duration", 10*time.Second, "how long to measure")
	f.DurationVar(&l.Warmup, "warmup", time.Second, "load before that")
	f.Int64Var(&l.Seed, "seed", 1, "of inputs and arrival times")
	asJSON := f.Bool("json", false, "print JSON, as docs/benchmark.md describes it")
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	l.Socket, l.Model, l.Feed = *socket, f.Arg(0), inputs.feed
	least := 0.0 // not given
	if f.Changed("in-flight") {
		least = 1
	}
	for _, r := range []struct {
		flag      string
		got       float64
		low, high float64
	}{
		{"clients", float64(l.Clients), 1, 4096}, {"in-flight", float64(l.InFlight), least, 65536}, {"rows", float64(l.Rows), 1, 1 << 20},
		{"rate", l.Rate, 0, 1e7}, {"duration", length.Seconds(), 0.3, 86400}, {"warmup", l.Warmup.Seconds(), 0, 3600},
	} {
		if !(r.got >= r.low && r.got <= r.high) {
			return fmt.Errorf("%w: --%s is %s, must be %s..%s", errUsage, r.flag, digits(r.got), digits(r.low), digits(r.high))
		}
	}
	if err := inputs.check(); err != nil {
		return err
	}
	l.Windows = max(3, int(length.Seconds()))
	l.Window = (*length / time.Duration(l.Windows)).Round(time.Millisecond)
	if _, _, err := profile.Workers(ctx, admin.New(l.Socket), l.Model); err != nil {
		return err
	}
	say := progress.New()
	r, err := l.Run(ctx, say)
	say.Clear()
	if r == nil {
		if errors.Is(err, progress.ErrInterrupted) {
			fmt.Fprintln(os.Stderr, "ringbatch: interrupted before anything was measured")
			return interrupted
		}
		return err
	}
	if unwritten := writeResult(r, *asJSON); unwritten != nil {
		return unwritten
	}
	if errors.Is(err, progress.ErrInterrupted) {
		return interrupted
	}
	return err
}

func writeResult(r *load.Result, asJSON bool) error {
	if asJSON {
		out := json.NewEncoder(os.Stdout)
		out.SetIndent("", "  ")
		return out.Encode(r)
	}
	var text bytes.Buffer
	r.Print(&text)
	_, err := os.Stdout.Write(text.Bytes())
	return err
}

// digits writes a number without an exponent.
func digits(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) }
