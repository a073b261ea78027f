// SPDX-License-Identifier: Apache-2.0

// Command relaybench measures what a relay reaches beside bare gRPC with the
// same messages, in turns in one run, and what further hosts add. The hosts are
// processes of this machine.
//
//	go build -o bin/ ./cmd/ringbatch ./cmd/relaybench && bin/relaybench
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/spf13/pflag"
)

// What it must reach: docs/relay.md.
const (
	aimLarge   = 0.75 // of bare gRPC's bytes/s, 32 × 602,112 bytes
	aimSmall   = 5.0  // × the requests/s of 64 callers one by one, 64 bytes
	aimLatency = 2.0  // × a bare unary call, one caller
	aimTwo     = 1.9  // × the throughput of one host
	aimFour    = 3.6
)

const (
	largeBytes = 602112
	smallBytes = 64
	answer     = 4000 // bytes of an answer of the large model
	batch      = 32
	producers  = 64
)

type options struct {
	seconds    float64
	rounds     int
	only       string
	json       string
	explain    bool
	relayFlags []string
	relays     int
	perProcess int
	inFlight   int
	producer   string
	checks     testbed.Checks
}

func main() {
	o := options{}
	role := pflag.String("role", "", "internal: bare, worker, local or producer")
	bare := pflag.String("bare", "", "internal: the bare server's address")
	dir := pflag.String("dir", "", "internal: where the sockets are")
	pflag.Float64Var(&o.seconds, "seconds", 1, "length of one turn")
	pflag.IntVar(&o.rounds, "rounds", 5, "turns of each")
	pflag.StringVar(&o.only, "only", "", "large, small, one or hosts")
	pflag.StringVar(&o.json, "json", "", "write the results to this file")
	pflag.BoolVar(&o.explain, "explain", false, "small, one: print each turn, where its CPU time went, how often threads slept, how full batches were and how long requests were where")
	pflag.IntVar(&o.perProcess, "per_process", 1, "small: producers that share a process, with one client or one connection between them")
	pflag.IntVar(&o.inFlight, "in_flight_per_producer", 1, "small: requests that each producer has in flight at once, to the ring as to the bare server, which is called one by one, too")
	pflag.StringVar(&o.producer, "producer", "", "small, one: the producers' program and its arguments, e.g. \"python bench/python/relay_producer.py\"")
	pflag.IntVar(&o.relays, "relays", 1, "small, one: relay processes, workers of one model here")
	pflag.StringSliceVar(&o.relayFlags, "relay_flags", nil, "further flags of the relays")
	pflag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	var err error
	switch *role {
	case "bare":
		err = serveBare(ctx)
	case "worker":
		err = serveModels(ctx)
	case "local":
		err = serveLocal(ctx)
	case "producer":
		err = runProducer(ctx, *dir, *bare, o.perProcess, o.inFlight)
	default:
		err = run(ctx, &o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "relaybench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o *options) error {
	b, err := newBed(ctx, o)
	if err != nil {
		return err
	}
	defer b.close()
	fmt.Printf("%d cores, %s, %d turns of %.1f s each\n\n", runtime.NumCPU(), runtime.Version(), o.rounds, o.seconds)
	for _, part := range []struct {
		name string
		run  func(*options, *bed) error
	}{{"large", large}, {"small", small}, {"one", oneCaller}, {"hosts", moreHosts}} {
		if o.only != "" && o.only != part.name {
			continue
		}
		if err := part.run(o, b); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return o.checks.Write(o.json, "relay")
}

// caller sends one request, or one message of several, and checks the answer.
type caller func(ctx context.Context) error

// inTurns gives the medians of several sets of callers.
func (o *options) inTurns(ctx context.Context, sets ...[]caller) ([]float64, error) {
	all := make([][]float64, len(sets))
	for round := range o.rounds + 1 {
		for i := range sets {
			d := time.Duration(o.seconds * float64(time.Second))
			if round == 0 { // to warm up
				d /= 3
			}
			rate, err := testbed.Turn(ctx, sets[i], d)
			if err != nil {
				return nil, err
			}
			if round > 0 {
				all[i] = append(all[i], rate)
			}
		}
	}
	medians := make([]float64, len(sets))
	for i := range all {
		medians[i] = testbed.Median(all[i])
	}
	return medians, nil
}

func large(o *options, b *bed) error {
	ring, err := b.producers("large", producers, 1, largeBytes, answer)
	if err != nil {
		return err
	}
	bare, err := b.bareCallers("large", 3, 1, batch, largeBytes, answer)
	if err != nil {
		return err
	}
	rates, err := o.inTurns(b.ctx, bare, ring)
	if err != nil {
		return err
	}
	bareMB, ringMB := rates[0]*batch*largeBytes/1e6, rates[1]*largeBytes/1e6
	o.checks.Report("large batches", fmt.Sprintf("602,112 bytes, batches of 32: relay %.0f MB/s, bare gRPC with the same messages %.0f MB/s", ringMB, bareMB), ringMB/bareMB, aimLarge, false)
	return nil
}

func small(o *options, b *bed) error {
	list, err := b.producerProcesses(producers/o.perProcess, o.perProcess, o.inFlight)
	if err != nil {
		return err
	}
	kinds := []string{bareKind, relayKind, localKind}
	if o.inFlight > 1 {
		kinds = append(kinds, singleKind)
	}
	all, err := o.produceInTurns(b, list, kinds...)
	if err != nil {
		return err
	}
	bare, relay, local := all[bareKind], all[relayKind], all[localKind]
	if o.inFlight == 1 {
		o.checks.Report("small requests", fmt.Sprintf("64 bytes, 64 producers: relay %.0f requests/s, one by one over gRPC %.0f (a ring with its worker here: %.0f)",
			relay.perSecond, bare.perSecond, local.perSecond), relay.perSecond/bare.perSecond, aimSmall, false)
		return nil
	}
	single := all[singleKind]
	text := fmt.Sprintf("64 bytes, 64 producers with %d in flight each: relay %.0f requests/s (a ring with its worker here: %.0f)", o.inFlight, relay.perSecond, local.perSecond)
	o.checks.Report("small requests, several in flight", fmt.Sprintf("%s; as many gRPC calls at once %.0f", text, bare.perSecond), relay.perSecond/bare.perSecond, aimSmall, false)
	o.checks.Report("small requests, several in flight, against one by one", fmt.Sprintf("%s; the same producers one by one over gRPC %.0f", text, single.perSecond), relay.perSecond/single.perSecond, aimSmall, false)
	return nil
}

func oneCaller(o *options, b *bed) error {
	list, err := b.producerProcesses(1, 1, 1)
	if err != nil {
		return err
	}
	all, err := o.produceInTurns(b, list, bareKind, relayKind, localKind)
	if err != nil {
		return err
	}
	bare, relay, local := all[bareKind], all[relayKind], all[localKind]
	o.checks.Report("one caller", fmt.Sprintf("64 bytes, 1 caller: relay %.0f µs, bare unary call %.0f µs (a ring with its worker here: %.0f µs)", relay.us, bare.us, local.us), relay.us/bare.us, aimLatency, true)
	return nil
}

// moreHosts has a model that sleeps as long as a GPU would compute.
func moreHosts(o *options, b *bed) error {
	var rates []float64
	for _, n := range []int{1, 2, 4} {
		model := fmt.Sprintf("slow%d", n)
		if err := b.relay(model, "slow", n); err != nil {
			return err
		}
		ring, err := b.producers(model, 12, batch, smallBytes, smallBytes)
		if err != nil {
			return err
		}
		rate, err := o.inTurns(b.ctx, ring)
		if err != nil {
			return err
		}
		rates = append(rates, rate[0])
	}
	text := strings.TrimSpace(fmt.Sprintf("simulated cost, 20 ms a batch of 32: 1, 2, 4 hosts %.0f, %.0f, %.0f requests/s", rates[0], rates[1], rates[2]))
	o.checks.Report("two hosts", text+"; two against one", rates[1]/rates[0], aimTwo, false)
	o.checks.Report("four hosts", text+"; four against one", rates[2]/rates[0], aimFour, false)
	return nil
}
