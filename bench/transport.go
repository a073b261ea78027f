// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/shm"
)

// The transport suite: what ringbatch itself costs, without a model. Every
// figure is a ratio to something measured in the same run, in turns with it,
// so that it means the same on every machine.

// transportParts are the measurements, in the order they run.
var transportParts = []string{"latency", "small", "large", "idle", "growth", "in_flight", "loops", "trace"}

// transportSuite is the JSON of the suite.
type transportSuite struct {
	Suite     string           `json:"suite"`
	Transport *transportReport `json:"transport"`
}

func (s *transportSuite) print(w io.Writer) { s.Transport.print(w) }

// transportReport is the key "transport" of the JSON.
type transportReport struct {
	LatencyRatio   float64 `json:"latency_ratio,omitempty"`
	SmallRatio     float64 `json:"small_ratio,omitempty"`
	LargeRatio     float64 `json:"large_ratio,omitempty"`
	IdleCPUPercent float64 `json:"idle_cpu_percent,omitempty"`
	CPUGrowthRatio float64 `json:"cpu_growth_ratio,omitempty"`

	FourModelsRatio float64 `json:"four_models_ratio,omitempty"`
	HostileRatio    float64 `json:"hostile_ratio,omitempty"`
	IdleModelsRatio float64 `json:"idle_models_ratio,omitempty"`

	TraceRatio float64 `json:"trace_ratio,omitempty"`

	Latency  *latencyFigures  `json:"latency,omitempty"`
	Small    *smallFigures    `json:"small,omitempty"`
	Large    *largeFigures    `json:"large,omitempty"`
	Idle     *idleFigures     `json:"idle,omitempty"`
	Growth   *growthFigures   `json:"growth,omitempty"`
	InFlight *inFlightFigures `json:"in_flight,omitempty"`
	Loops    *loopsFigures    `json:"loops,omitempty"`
	Trace    *traceFigures    `json:"trace,omitempty"`

	Checks []testbed.Check `json:"checks"` // the lines of the table
}

// transportOptions choose what is measured and for how long.
type transportOptions struct {
	Only     []string
	Rounds   int           // turns of each comparison
	Round    time.Duration // length of one turn
	Idle     time.Duration
	Requests int // of the in-flight part
}

func (o *transportOptions) validate() error {
	for _, p := range o.Only {
		if !slices.Contains(transportParts, p) {
			return fmt.Errorf("--only: no part %q; there are %s", p, strings.Join(transportParts, ", "))
		}
	}
	if o.Rounds < 1 || o.Round < 50*time.Millisecond || o.Idle < 100*time.Millisecond || o.Requests < 1 {
		return fmt.Errorf("--rounds must be at least 1, --round at least 50ms, --idle at least 100ms, --requests at least 1")
	}
	return nil
}

func runTransport(ctx context.Context, o transportOptions, say *progress.Line) (*transportSuite, error) {
	r := &transportReport{Checks: []testbed.Check{}}
	suite := &transportSuite{"transport", r}
	parts := map[string]func(*fleet, transportOptions, *progress.Line, *transportReport) error{
		"latency": measureLatency, "small": measureSmall, "large": measureLarge,
		"idle": measureIdle, "growth": measureGrowth, "in_flight": measureInFlight, "loops": measureLoops, "trace": measureTrace,
	}
	for _, name := range transportParts {
		if len(o.Only) > 0 && !slices.Contains(o.Only, name) {
			continue
		}
		f, err := newFleet(ctx)
		if err != nil {
			return suite, err
		}
		err = parts[name](f, o, say, r)
		f.Close()
		if err != nil {
			if ctx.Err() != nil {
				err = testbed.ErrInterrupted
			}
			return suite, fmt.Errorf("%s: %w", name, err)
		}
		say.Clear()
	}
	return suite, nil
}

func (r *transportReport) check(name string, measured float64, must string, ok bool, behind string, a ...any) {
	r.Checks = append(r.Checks, testbed.Check{Name: name, Measured: measured, Must: must, OK: ok, Behind: fmt.Sprintf(behind, a...)})
}

// print writes the table.
func (r *transportReport) print(w io.Writer) {
	fmt.Fprintf(w, "%-18s %10s  %-8s %-4s %s\n", "transport", "measured", "must be", "", "how it came about")
	for _, c := range r.Checks {
		mark := "ok"
		if !c.OK {
			mark = "MISS"
		}
		fmt.Fprintf(w, "%-18s %10s  %-8s %-4s %s\n", c.Name, short(c.Measured), c.Must, mark, c.Behind)
	}
}

// echo describes a broker with echo workers, ready for producers.
type echo struct {
	broker  *testbed.Process
	workers []*testbed.Process
	socket  string
}

func (f *fleet) startEcho(workers int, job echoJob) (echo, error) {
	var e echo
	var err error
	if e.broker, e.socket, err = f.startBroker(job.Model + ".sock"); err != nil {
		return e, err
	}
	job.Socket = e.socket
	e.workers, err = f.StartAll(workers, func(int) testbed.Spec { return testbed.Spec{Role: "echo worker", Job: job, Procs: 2} })
	return e, err
}

// startTransport starts producers, each with its own sessions.
func (f *fleet) startTransport(n int, job transportJob) ([]*testbed.Process, error) {
	return f.StartAll(n, func(i int) testbed.Spec {
		j := job
		j.Seed = uint64(i + 1)
		return testbed.Spec{Role: "transport", Job: j, Procs: 2}
	})
}

// leadTime lets every process receive its order before the common start.
const leadTime = 30 * time.Millisecond

// together gives all producers the same order with a common start and end.
func together(procs []*testbed.Process, o transportOrder, d time.Duration) ([]transportResult, error) {
	o.Start = shm.Now() + int64(leadTime)
	o.Until = o.Start + int64(d)
	return orderAll[transportResult](procs, o)
}

// orderAll sends one command to all and gathers their answers.
func orderAll[R any](procs []*testbed.Process, order any) ([]R, error) {
	for _, p := range procs {
		if err := p.Send(order); err != nil {
			return nil, err
		}
	}
	results := make([]R, len(procs))
	for i, p := range procs {
		if err := p.Receive(&results[i]); err != nil {
			return nil, err
		}
	}
	return results, nil
}

func total(rs []transportResult) (sum transportResult) {
	for _, r := range rs {
		sum.Requests += r.Requests
		sum.Bytes += r.Bytes
		sum.CPU += r.CPU
	}
	return sum
}

// median of some figures; they are sorted in place.
func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
