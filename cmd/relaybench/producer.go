// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/testbed"
)

// Producers of small requests are processes of their own, as a user's are, and
// the same processes call the ring and the bare server, in turns:
//
//	parent → child   KIND MILLISECONDS
//	child → parent   CALLS MEDIAN_MICROSECONDS, or "failed: …"
type producer struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// The kinds of calls that a producer makes.
const (
	bareKind   = "bare"       // unary calls to the bare server, as many at once as requests to the ring
	singleKind = "one_by_one" // the same, one at a time
	relayKind  = "relay"      // a request of the ring whose worker is the relay
	localKind  = "local"      // of a ring whose worker is on this host: what the relay cannot be quicker than
)

// producerProcesses starts n processes of so many producers, each with so many
// requests in flight.
func (b *bed) producerProcesses(n, each, inFlight int) (list []*producer, err error) {
	for range n {
		program := []string{b.self}
		if len(b.producer) > 0 {
			program = b.producer
		}
		p := &producer{cmd: exec.CommandContext(b.ctx, program[0], append(slices.Clone(program[1:]), "--role", "producer", "--dir", b.dir, "--bare", b.bare, "--per_process", fmt.Sprint(each), "--in_flight_per_producer", fmt.Sprint(inFlight))...)}
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		p.cmd.Stderr = os.Stderr
		if p.in, err = p.cmd.StdinPipe(); err != nil {
			return nil, err
		}
		out, err := p.cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		p.out = bufio.NewReader(out)
		if err := p.cmd.Start(); err != nil {
			return nil, err
		}
		b.ends = append(b.ends, func() {
			p.in.Close()
			_ = p.cmd.Wait()
		})
		list = append(list, p)
	}
	for _, p := range list {
		if text, err := p.out.ReadString('\n'); text != "ready\n" {
			return nil, fmt.Errorf("a producer did not start: %q %w", text, err)
		}
	}
	return list, nil
}

// produce has all producers call for so long, and gives calls a second and
// the median of their medians, in µs.
func produce(list []*producer, kind string, d time.Duration) (perSecond, typical float64, err error) {
	for _, p := range list {
		fmt.Fprintln(p.in, kind, d.Milliseconds())
	}
	var took []float64
	for _, p := range list {
		text, err := p.out.ReadString('\n')
		if err != nil {
			return 0, 0, err
		}
		var rate, us float64
		if _, err := fmt.Sscan(text, &rate, &us); err != nil {
			return 0, 0, fmt.Errorf("%s: %s", kind, strings.TrimSpace(text))
		}
		perSecond += rate
		took = append(took, us)
	}
	return perSecond, testbed.Median(took), nil
}

// figure is the medians of one kind's turns.
type figure struct{ perSecond, us float64 }

// produceInTurns gives the medians of several kinds of calls.
func (o *options) produceInTurns(b *bed, list []*producer, kinds ...string) (map[string]figure, error) {
	rates, times := map[string][]float64{}, map[string][]float64{}
	for round := range o.rounds + 1 {
		for _, kind := range kinds {
			d := time.Duration(o.seconds * float64(time.Second))
			if round == 0 { // to warm up
				d /= 3
			}
			then := b.accountNow(list)
			rate, us, err := produce(list, kind, d)
			if err != nil {
				return nil, err
			}
			if o.explain {
				fmt.Printf("  %-6s %7.0f/s, %5.0f µs; %s\n", kind, rate, us, b.accountNow(list).since(then, rate*d.Seconds()))
			}
			if round > 0 {
				rates[kind], times[kind] = append(rates[kind], rate), append(times[kind], us)
			}
		}
	}
	all := map[string]figure{}
	for _, kind := range kinds {
		all[kind] = figure{testbed.Median(rates[kind]), testbed.Median(times[kind])}
	}
	return all, nil
}

// runProducer is the child.
func runProducer(ctx context.Context, dir, bare string, each, inFlight int) (err error) {
	b := &bed{ctx: ctx, dir: dir, bare: bare}
	calls := map[string][]caller{}
	for kind, model := range map[string]string{relayKind: "small", localKind: localKind} {
		if calls[kind], err = b.producers(model, 1, each*inFlight, smallBytes, smallBytes); err != nil {
			return err
		}
	}
	if calls[bareKind], err = b.bareCallers("small", 1, each*inFlight, 1, smallBytes, smallBytes); err != nil {
		return err
	}
	calls[singleKind] = calls[bareKind][:each]
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var kind string
		var ms int
		if _, err := fmt.Sscan(in.Text(), &kind, &ms); err != nil {
			return err
		}
		rate, us, err := timed(ctx, calls[kind], time.Duration(ms)*time.Millisecond)
		if err != nil {
			fmt.Println("failed:", err)
			continue
		}
		fmt.Println(rate, us)
	}
	return nil
}

// timed runs the callers for so long, and gives calls a second and the median
// of their times in µs.
func timed(ctx context.Context, callers []caller, d time.Duration) (perSecond, us float64, err error) {
	took, failed := make([][]float64, len(callers)), make([]error, len(callers))
	var all sync.WaitGroup
	begin := time.Now()
	for i, call := range callers {
		all.Go(func() {
			for last := begin; failed[i] == nil && last.Sub(begin) < d; {
				failed[i] = call(ctx)
				now := time.Now()
				took[i] = append(took[i], float64(now.Sub(last))/1e3)
				last = now
			}
		})
	}
	all.Wait()
	every := slices.Concat(took...)
	return float64(len(every)) / time.Since(begin).Seconds(), testbed.Median(every), errors.Join(failed...)
}
