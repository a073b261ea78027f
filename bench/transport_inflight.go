// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// inFlightFigures: 10,000 requests in flight from one process.
type inFlightFigures struct {
	InFlight     int     `json:"in_flight"`
	Requests     int     `json:"requests"`
	RequestsPerS float64 `json:"requests_per_s"`
	Threads      int     `json:"threads"` // the most seen at once
	LostWakeUps  bool    `json:"lost_wake_ups"`
}

const (
	inFlightRequests = 10_000
	// A request that takes this long although every worker is idle has lost
	// its wake-up.
	stallTime = 20 * time.Second
)

func measureInFlight(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	e, err := f.startEcho(1, echoJob{Model: "flight", Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, MaxBatch: 1024, Slots: 1 << 14})
	if err != nil {
		return err
	}
	producers, err := f.startTransport(1, transportJob{Socket: e.socket, Model: "flight", Window: inFlightRequests, Sessions: 1})
	if err != nil {
		return err
	}
	p := producers[0]
	type outcome struct {
		rs  []transportResult
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		rs, err := together(producers, transportOrder{Do: "in flight", Count: o.Requests}, 0)
		done <- outcome{rs, err}
	}()
	fig := &inFlightFigures{InFlight: inFlightRequests, Requests: o.Requests}
	r.InFlight = fig
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	answered, moved := uint64(0), time.Now()
	for {
		select {
		case out := <-done:
			if out.err != nil {
				return out.err
			}
			fig.RequestsPerS = float64(out.rs[0].Requests) / (float64(out.rs[0].Nanos) / 1e9)
			r.check("in_flight", float64(fig.Threads), "< 64", fig.Threads < 64,
				"OS threads, with %d requests in flight from one process; %s requests at %s/s, every one answered",
				inFlightRequests, big(float64(o.Requests)), big(fig.RequestsPerS))
			return nil
		case <-tick.C:
			u, err := testbed.UsageOf(p.Pid())
			if err != nil {
				continue // it has ended: the other side of this select tells why
			}
			fig.Threads = max(fig.Threads, u.Threads)
			m, err := modelStats(f.Context(), e.socket, "flight")
			if err != nil {
				return err
			}
			if m.Requests != answered {
				answered, moved = m.Requests, time.Now()
			}
			say.Say("in flight: %s of %s requests, %d threads", big(float64(answered)), big(float64(o.Requests)), u.Threads)
			if time.Since(moved) > stallTime {
				fig.LostWakeUps = true
				r.check("in_flight", float64(fig.Threads), "< 64", false, "a wake-up was lost: nothing has moved for %v after %s of %s requests", stallTime, big(float64(answered)), big(float64(o.Requests)))
				return nil
			}
		}
	}
}
