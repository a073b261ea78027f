// SPDX-License-Identifier: Apache-2.0

// Package rig is the common part of the benchmark's suites: flags, processes, turns and the report.
package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/printable"
	"github.com/ringbatch/ringbatch/internal/progress"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// Suite measures its parts one after the other. Each figure is a ratio to something measured in the same run, in turns with
// it, so that it means the same on every machine.
type Suite struct {
	Name, About string
	Parts       []Part
	Round       time.Duration // default length of a turn
	Rounds      int
	Flags       func(*pflag.FlagSet) // flags of this suite alone; nil: none
}

// Part is one measurement.
type Part struct {
	Name string
	Run  func(*Rig)
}

// Rig is the environment of a part: a bed for its processes, the number and length of turns, and the report.
type Rig struct {
	*testbed.Bed
	Rounds int
	Round  time.Duration

	say    *progress.Line
	report *report
}

// Run measures the parts that the flags select and writes the report to out. After an error it writes the figures so far.
func (s *Suite) Run(ctx context.Context, args []string, out io.Writer) error {
	var names []string
	for _, p := range s.Parts {
		names = append(names, p.Name)
	}
	f := pflag.NewFlagSet("bench "+s.Name, pflag.ContinueOnError)
	f.SortFlags = false
	only := f.StringSlice("only", nil, "only these parts of "+strings.Join(names, ","))
	rounds := f.Int("rounds", s.Rounds, "turns of each comparison")
	round := f.Duration("round", s.Round, "length of one turn")
	path := f.String("json", "", "write the results to this file")
	if s.Flags != nil {
		s.Flags(f)
	}
	f.Usage = func() { fmt.Fprintf(os.Stderr, "%s\n\n%s", s.About, f.FlagUsages()) }
	if err := f.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return nil
		}
		return err
	}
	for _, p := range *only {
		if !slices.Contains(names, p) {
			return fmt.Errorf("--only: no part %q; there are %s", p, strings.Join(names, ", "))
		}
	}
	switch {
	case f.NArg() > 0:
		return fmt.Errorf("%q: bench %s takes flags only; see --help", f.Arg(0), s.Name)
	case *rounds < 1 || *round < 50*time.Millisecond:
		return errors.New("--rounds must be at least 1, --round at least 50ms")
	}
	if err := progress.CanWrite(*path); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	r := &report{suite: s.Name}
	say := progress.New()
	var err error
	for _, p := range s.Parts {
		if err == nil && (len(*only) == 0 || slices.Contains(*only, p.Name)) {
			if err = runPart(ctx, p, &Rig{Rounds: *rounds, Round: *round, say: say, report: r}); err != nil {
				err = fmt.Errorf("%s: %w", p.Name, err)
			}
		}
	}
	say.Clear()
	return errors.Join(err, r.print(out), r.write(*path))
}

func runPart(ctx context.Context, p Part, r *Rig) (err error) {
	if r.Bed, err = testbed.New(ctx); err != nil {
		return err
	}
	defer r.Close()
	defer func() {
		switch e := recover().(type) {
		case nil:
		case broken:
			if err = e.error; ctx.Err() != nil {
				err = progress.ErrInterrupted
			}
		default:
			panic(e)
		}
	}()
	p.Run(r)
	return nil
}

// broken is why a part cannot go on.
type broken struct{ error }

// Must ends the part if there is an error.
func (r *Rig) Must(err error) {
	if err != nil {
		panic(broken{err})
	}
}

// Say shows the progress.
func (r *Rig) Say(format string, a ...any) { r.say.Say(format, a...) }

// Check reports a figure with its aim: op is "<", "<=" or ">="; "" judges nothing.
func (r *Rig) Check(name string, measured float64, op string, aim float64, behind string, a ...any) {
	c := check{Name: name, Measured: measured, Must: "-", OK: true, Behind: fmt.Sprintf(behind, a...)}
	if op != "" {
		c.Must = fmt.Sprintf("%s %g", op, aim)
		c.OK = op == "<" && measured < aim || op == "<=" && measured <= aim || op == ">=" && measured >= aim
	}
	r.report.checks = append(r.report.checks, c)
}

// InTurns runs the rounds of a comparison; the first does not count.
func (r *Rig) InTurns(what string, round func(counts bool)) {
	for i := range r.Rounds + 1 {
		r.Say("%s: round %d of %d", what, i+1, r.Rounds+1)
		round(i > 0)
	}
}

// StartBroker starts one whose models are declared by their workers.
func (r *Rig) StartBroker(name string) (*testbed.Process, string) {
	p, socket, err := StartBroker(r.Bed, name)
	r.Must(err)
	return p, socket
}

// MustStart starts a process and waits until it is ready.
func (r *Rig) MustStart(s testbed.Spec) *testbed.Process {
	p, err := r.StartReady(s)
	r.Must(err)
	return p
}

// MustStartAll starts n processes and waits until all are ready.
func (r *Rig) MustStartAll(n int, spec func(i int) testbed.Spec) []*testbed.Process {
	all, err := r.StartAll(n, spec)
	r.Must(err)
	return all
}

// StartBroker starts one on a socket of the bed's folder.
func StartBroker(bed *testbed.Bed, name string) (*testbed.Process, string, error) {
	const manyModels = 4000 // a part of the transport suite has a thousand
	socket := bed.Path(name)
	p, err := bed.StartReady(testbed.Spec{Role: "broker", Job: testbed.BrokerJob{Socket: socket,
		Limits: broker.Limits{MaxUserModels: manyModels}}})
	return p, socket, err
}

// report is the figures of a suite with their aims. hack/results.py makes tables of its JSON:
//
//	{"suite": NAME, NAME: {"checks": [CHECK…], CHECK_NAME: measured, …}}
type report struct {
	suite  string
	checks []check
}

type check struct {
	Name     string  `json:"name"`
	Measured float64 `json:"measured"`
	Must     string  `json:"must"`
	OK       bool    `json:"ok"`
	Behind   string  `json:"behind"` // the raw figures, in words
}

func (r *report) print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%-20s %10s  %-8s %-4s %s\n", r.suite, "measured", "must be", "", "how it came about")
	for _, c := range r.checks {
		mark := "ok"
		if !c.OK {
			mark = "MISS"
		}
		fmt.Fprintf(&b, "%-20s %10s  %-8s %-4s %s\n", c.Name, printable.Number(c.Measured), c.Must, mark, c.Behind)
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("print the results: %w", err)
	}
	return nil
}

func (r *report) write(path string) error {
	if path == "" {
		return nil
	}
	keys := map[string]any{"checks": slices.Concat([]check{}, r.checks)}
	for _, c := range r.checks {
		keys[c.Name] = c.Measured
	}
	return WriteJSON(path, map[string]any{"suite": r.suite, r.suite: keys})
}

// WriteJSON writes the file of --json.
func WriteJSON(path string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode results: %w", err)
	}
	if err := os.WriteFile(path, append(data, '\n'), 0o644); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	return nil
}
