// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/stats"
)

// traceFigures: what the flight recorder (ringbatch trace) costs while it is
// on. Off, it is one comparison with nil for each request.
type traceFigures struct {
	OffPerS     float64   `json:"off_requests_per_s"`
	OnPerS      float64   `json:"on_requests_per_s"`
	OffBrokerUS float64   `json:"off_broker_cpu_us"` // CPU time of the broker for each request
	OnBrokerUS  float64   `json:"on_broker_cpu_us"`
	OffClientUS float64   `json:"off_client_cpu_us"` // of the clients, which tell their times
	OnClientUS  float64   `json:"on_client_cpu_us"`
	Recorded    int       `json:"recorded"` // requests, in all turns
	Missed      int       `json:"missed"`   // for want of room
	Rounds      []float64 `json:"rounds"`   // on / off
}

const (
	traceProducers = 2
	traceInFlight  = 4 // each
	tracePairs     = 8 // of turns in a round
	traceRoom      = 20_000
	traceTail      = 300 * time.Millisecond // the recording ends well after the turn, and is written then
	traceSettle    = 100 * time.Millisecond // its beginning, and what the turn before left to be collected
)

func measureTrace(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	fig := &traceFigures{}
	r.Trace = fig
	e, err := f.startEcho(1, echoJob{Model: "traced", Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, MaxBatch: smallBatch, Slots: 4 * smallBatch})
	if err != nil {
		return err
	}
	producers, err := f.startTransport(traceProducers, transportJob{Socket: e.socket, Model: "traced", Window: traceInFlight, Sessions: 1})
	if err != nil {
		return err
	}
	serving := [][]*testbed.Process{{e.broker}}
	turn := o.Round
	var rates, costs, clients [2][]float64 // off, on
	measure := func(on bool) (float64, [2]float64, error) {
		record := func() error { return nil }
		if on {
			record = fig.record(f.Context(), e.socket, traceSettle+turn+traceTail)
		}
		time.Sleep(traceSettle)
		rate, used, err := streamRate(serving, producers, 1, turn)
		if err == nil {
			err = record()
		}
		return rate, [2]float64(append(used, 0, 0)), err
	}
	err = inTurns("trace", o, say, func(counts bool) error {
		for pair := range tracePairs {
			var rate [2]float64
			var cost [2][2]float64 // of the broker, of the clients
			for i := range 2 {
				on := (i + pair) % 2 // now the one first, now the other
				var err error
				if rate[on], cost[on], err = measure(on == 1); err != nil {
					return err
				}
			}
			// So short that the recorder has room for all of the next turns.
			turn = min(o.Round, max(20*time.Millisecond, time.Duration(traceRoom/rate[0]*float64(time.Second))))
			if !counts {
				continue
			}
			fig.Rounds = append(fig.Rounds, rate[1]/rate[0])
			for on := range 2 {
				rates[on], costs[on], clients[on] = append(rates[on], rate[on]), append(costs[on], cost[on][0]), append(clients[on], cost[on][1])
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	fig.OffPerS, fig.OnPerS = medianOf(rates[0]), medianOf(rates[1])
	fig.OffBrokerUS, fig.OnBrokerUS = medianOf(costs[0]), medianOf(costs[1])
	fig.OffClientUS, fig.OnClientUS = medianOf(clients[0]), medianOf(clients[1])
	r.TraceRatio = medianOf(fig.Rounds)
	r.check("trace_ratio", r.TraceRatio, ">= 0.98", r.TraceRatio >= 0.98,
		"requests/s while a trace is on / off, %d producers with %d in flight each: %s / %s, %.2f / %.2f µs of the broker's CPU each, %.2f / %.2f of the clients'; %s recorded, %s not; median of %d pairs of turns",
		traceProducers, traceInFlight, big(fig.OnPerS), big(fig.OffPerS), fig.OnBrokerUS, fig.OffBrokerUS, fig.OnClientUS, fig.OffClientUS, big(float64(fig.Recorded)), big(float64(fig.Missed)), len(fig.Rounds))
	return nil
}

// record has the broker record for so long; the function waits for its end.
func (fig *traceFigures) record(ctx context.Context, socket string, d time.Duration) func() error {
	type result struct {
		trace *stats.Trace
		err   error
	}
	done := make(chan result, 1)
	go func() {
		t, err := admin.New(socket).Trace(ctx, "traced", d)
		done <- result{t, err}
	}()
	return func() error {
		r := <-done
		if r.err != nil {
			return fmt.Errorf("trace: %w", r.err)
		}
		fig.Recorded += len(r.trace.Requests)
		fig.Missed += r.trace.Missed
		return nil
	}
}
