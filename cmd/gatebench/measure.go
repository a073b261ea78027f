// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

// measure prints every ratio of one protocol.
func measure(ctx context.Context, o *options, protocol string, bare, gate *server) error {
	for _, s := range sizes {
		if o.size != "" && o.size != s.model {
			continue
		}
		if o.part == "one" {
			if err := oneCaller(ctx, o, protocol, s, bare, gate); err != nil {
				return err
			}
			continue
		}
		rates, err := closedLoop(ctx, o, protocol, s, bare, gate)
		if err != nil {
			return err
		}
		aim, unit, scale := aimSmall, "requests/s", 1.0
		if s.elements > 1000 {
			aim, unit, scale = aimLarge, "MB/s", float64(4*s.elements)/1e6
		}
		o.checks.Report(protocol+" "+s.name+", many callers", fmt.Sprintf("%s, %s, %d callers: gateway %.0f, bare %.0f %s", protocol, s.name, o.callers, rates[1]*scale, rates[0]*scale, unit), rates[1]/rates[0], aim, false)
		fmt.Printf("    CPU per request: bare, callers %s; gateway, broker, worker, callers %s\n", bare.spent, gate.spent)
		if o.part == "closed" {
			continue
		}
		if o.part == "" {
			if err := oneCaller(ctx, o, protocol, s, bare, gate); err != nil {
				return err
			}
		}
		if err := openLoop(ctx, o, protocol, s, bare, gate, 0.8*rates[1]); err != nil {
			return err
		}
	}
	return nil
}

// closedLoop gives the requests/s of both servers, measured in turns.
func closedLoop(ctx context.Context, o *options, protocol string, s size, servers ...*server) ([]float64, error) {
	callers := make([][]caller, len(servers))
	for i, v := range servers {
		var err error
		callers[i], err = newCallers(o.callers, protocol, v.address(protocol), s)
		defer func() {
			for _, c := range callers[i] {
				c.end()
			}
		}()
		if err != nil {
			return nil, err
		}
		if _, err := testbed.Turn(ctx, calls(callers[i]), 300*time.Millisecond); err != nil { // warm
			return nil, fmt.Errorf("%s: %w", v.name, err)
		}
	}
	all := make([][]float64, len(servers))
	books := make([]cpuBook, len(servers))
	for range o.rounds {
		for i := range servers {
			books[i].begin(servers[i].pids)
			rate, err := testbed.Turn(ctx, calls(callers[i]), time.Duration(o.seconds*float64(time.Second)))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", servers[i].name, err)
			}
			books[i].end(rate * o.seconds)
			all[i] = append(all[i], rate)
		}
	}
	rates := make([]float64, len(servers))
	for i := range all {
		rates[i] = testbed.Median(all[i])
		servers[i].spent = books[i].String()
	}
	return rates, nil
}

// oneCaller compares latencies: what the gateway adds to the bare server is
// the ring's request, and little more.
func oneCaller(ctx context.Context, o *options, protocol string, s size, bare, gate *server) error {
	var callers []caller
	for _, v := range []*server{bare, gate} {
		c, err := newCallers(1, protocol, v.address(protocol), s)
		if err != nil {
			return err
		}
		callers = append(callers, c[0])
		defer c[0].end()
	}
	ring, err := newRingCaller(ctx, s)
	if err != nil {
		return err
	}
	defer ring.end()
	callers = append(callers, ring, ring)
	p50 := make([][]float64, len(callers))
	for round := range o.rounds + 1 {
		for i, c := range callers {
			var took []float64
			for end := time.Now().Add(time.Duration(o.seconds * float64(time.Second) / 2)); time.Now().Before(end); {
				if i == 3 { // the ring at the pace of a network: broker and worker have gone to sleep
					if err := callers[0].call(ctx); err != nil {
						return err
					}
				}
				begin := time.Now()
				if err := c.call(ctx); err != nil {
					return err
				}
				took = append(took, time.Since(begin).Seconds()*1e6)
			}
			if round > 0 { // the first is to warm up
				p50[i] = append(p50[i], testbed.Median(took))
			}
		}
	}
	b, g, hot, paced := testbed.Median(p50[0]), testbed.Median(p50[1]), testbed.Median(p50[2]), testbed.Median(p50[3])
	what := fmt.Sprintf("%s, %s, 1 caller: gateway %.0f µs, bare %.0f µs, ringbatch", protocol, s.name, g, b)
	o.checks.Report(protocol+" "+s.name+", one caller, ring awake", fmt.Sprintf("%s %.0f µs one after the other; added / ringbatch", what, hot), (g-b)/hot, aimLatency, true)
	o.checks.Report(protocol+" "+s.name+", one caller, ring at the network's pace", fmt.Sprintf("%s %.0f µs after each answer of the bare server; added / ringbatch", what, paced), (g-b)/paced, aimLatency, true)
	return nil
}

// openLoop sends at a rate, whether or not answers come, and measures from the
// moment at which a request was due.
func openLoop(ctx context.Context, o *options, protocol string, s size, bare, gate *server, rate float64) error {
	p99 := make([][]float64, 2)
	for range o.rounds {
		for i, v := range []*server{bare, gate} {
			took, err := openTurn(ctx, o, protocol, v.address(protocol), s, rate)
			if err != nil {
				return fmt.Errorf("%s: %w", v.name, err)
			}
			slices.Sort(took)
			p99[i] = append(p99[i], took[len(took)*99/100])
		}
	}
	b, g := testbed.Median(p99[0]), testbed.Median(p99[1])
	o.checks.Report(protocol+" "+s.name+", open loop p99", fmt.Sprintf("%s, %s, open loop at %.0f requests/s: p99 gateway %.2f ms, bare %.2f ms", protocol, s.name, rate, g, b), g/b, aimP99, true)
	return nil
}

func openTurn(ctx context.Context, o *options, protocol, address string, s size, rate float64) ([]float64, error) {
	callers, err := newCallers(4*o.callers, protocol, address, s)
	defer func() {
		for _, c := range callers {
			c.end()
		}
	}()
	if err != nil {
		return nil, err
	}
	due := make(chan time.Time, 1<<16)
	failed := make(chan error, len(callers))
	var mu sync.Mutex
	var took []float64
	var wg sync.WaitGroup
	for _, c := range callers {
		if err := c.call(ctx); err != nil { // warm
			return nil, err
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			var mine []float64
			for t := range due {
				if err := c.call(ctx); err != nil {
					failed <- err
					break
				}
				mine = append(mine, time.Since(t).Seconds()*1e3)
			}
			mu.Lock()
			took = append(took, mine...)
			mu.Unlock()
		}()
	}
	random := rand.New(rand.NewPCG(1, 2)) // the same arrivals for both
	next := time.Now()
	for end := next.Add(time.Duration(o.seconds * float64(time.Second))); next.Before(end); {
		next = next.Add(time.Duration(random.ExpFloat64() / rate * float64(time.Second)))
		time.Sleep(time.Until(next))
		due <- next
	}
	close(due)
	wg.Wait()
	select {
	case err := <-failed:
		return nil, err
	default:
	}
	if len(took) == 0 {
		return nil, fmt.Errorf("nothing was answered")
	}
	return took, nil
}
