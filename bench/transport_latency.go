// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"golang.org/x/sys/unix"
)

// latencyFigures: one client, one worker, 64 bytes, one request at a time,
// against the futex round trip between two parked processes.
type latencyFigures struct {
	RequestUS    float64   `json:"request_us"`     // median, Claim to Release
	RequestP99US float64   `json:"request_p99_us"` // median over rounds
	FutexUS      float64   `json:"futex_us"`       // the quicker of the two below
	FutexRawUS   float64   `json:"futex_raw_us"`   // past the Go scheduler
	FutexGoUS    float64   `json:"futex_go_us"`    // through it, as every Go program must
	Rounds       []float64 `json:"rounds"`         // ratio of each round
}

const latencyRequests = 4000 // per round

func measureLatency(f *fleet, o transportOptions, say *progress.Line, r *transportReport) error {
	page, err := sharedPage()
	if err != nil {
		return err
	}
	defer page.Close()
	pong, err := f.StartReady(testbed.Spec{Role: "futex pong", Files: []*os.File{page}})
	if err != nil {
		return err
	}
	ping, err := f.StartReady(testbed.Spec{Role: "futex ping", Files: []*os.File{page}})
	if err != nil {
		return err
	}
	e, err := f.startEcho(1, echoJob{Model: "echo64", Inputs: []string{"x:u8[64]"}, Outputs: []string{"y:u8[64]"}, MaxBatch: 32, WaitTime: time.Millisecond, Slots: 64})
	if err != nil {
		return err
	}
	producers, err := f.startTransport(1, transportJob{Socket: e.socket, Model: "echo64", Window: 8, Sessions: 1})
	if err != nil {
		return err
	}
	futex := func(raw bool) (float64, error) {
		ns, err := orderAll[int64]([]*testbed.Process{pong, ping}, futexRound{latencyRequests, raw})
		if err != nil {
			return 0, err
		}
		return float64(ns[1]) / 1e3, nil
	}
	fig := &latencyFigures{}
	var requests, p99s, raws, gos []float64
	for round := range 2*o.Rounds + 1 {
		say.Say("latency: round %d of %d", round+1, 2*o.Rounds+1)
		rs, err := together(producers, transportOrder{Do: "latency", Count: latencyRequests}, 0)
		if err != nil {
			return err
		}
		raw, err := futex(true)
		if err != nil {
			return err
		}
		through, err := futex(false)
		if err != nil {
			return err
		}
		if round == 0 {
			continue // warm-up
		}
		us := float64(rs[0].Nanos) / 1e3
		requests, p99s = append(requests, us), append(p99s, float64(rs[0].P99)/1e3)
		raws, gos = append(raws, raw), append(gos, through)
		fig.Rounds = append(fig.Rounds, us/min(raw, through))
	}
	fig.RequestUS, fig.RequestP99US, fig.FutexRawUS, fig.FutexGoUS = median(requests), median(p99s), median(raws), median(gos)
	fig.FutexUS = min(fig.FutexRawUS, fig.FutexGoUS)
	r.Latency = fig
	r.LatencyRatio = median(slices.Clone(fig.Rounds))
	r.check("latency_ratio", r.LatencyRatio, "<= 2.5", r.LatencyRatio <= 2.5,
		"request %.1f µs (p99 %.1f) / futex round trip %.1f µs (raw %.1f, through Go %.1f); median of %d rounds",
		fig.RequestUS, fig.RequestP99US, fig.FutexUS, fig.FutexRawUS, fig.FutexGoUS, len(fig.Rounds))
	return nil
}

// sharedPage is a page of memory to be given to two processes.
func sharedPage() (*os.File, error) {
	fd, err := unix.MemfdCreate("ringbatch-bench-futex", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "futex page")
	if err := f.Truncate(4096); err != nil {
		f.Close()
		return nil, fmt.Errorf("memfd: %w", err)
	}
	return f, nil
}
