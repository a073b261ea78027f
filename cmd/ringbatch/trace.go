// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/progress"
)

func runTrace(ctx context.Context, args []string) error {
	f := flags("trace", " MODEL", `Record the life of each request of a model: claiming and filling slots, the queue, the way to the
worker, the computation, the client's wake-up; batches by worker; workers that come and go.
--out is in the Chrome trace format: open it at ui.perfetto.dev or in chrome://tracing.`,
		`  ringbatch trace resnet50 --duration 5s --out trace.json
  ringbatch trace resnet50 --slowest 20
`)
	socket := socketFlag(f)
	length := f.Duration("duration", 5*time.Second, "how long to record, at most 1m")
	out := f.String("out", "", "write the recording to this `FILE`")
	slowest := f.Int("slowest", 0, "print `N` of the slowest requests, and where their time went (default 10 without --out)")
	if err := parse(f, args, 1, 1); err != nil {
		return err
	}
	if *length <= 0 || *length > time.Minute {
		return fmt.Errorf("%w: --duration is %v, must be more than 0 and at most 1m", errUsage, *length)
	}
	if err := progress.CanWrite(*out); err != nil {
		return fmt.Errorf("--out: %w", err)
	}
	t, err := admin.New(*socket).Trace(ctx, f.Arg(0), *length)
	if err != nil {
		return err
	}
	fmt.Printf("%d requests in %.3g s", len(t.Requests), (t.ToUS-t.FromUS)/1e6)
	if t.Missed > 0 {
		fmt.Printf(", %d more were not recorded for lack of room", t.Missed)
	}
	fmt.Println()
	if *out != "" {
		if err := writeTrace(*out, t); err != nil {
			return err
		}
		fmt.Printf("%s: open it at ui.perfetto.dev\n", *out)
	} else if *slowest == 0 {
		*slowest = 10
	}
	return printSlowest(t, *slowest)
}

// part is one part of a request's time.
type part struct {
	name     string
	from, to float64
	known    bool // only the client knows some times, and may not report them
}

// partsOf are the parts of a request in the order of time.
func partsOf(r *stats.TracedRequest) [6]part {
	reported, woke := r.ClaimedUS != 0, r.WokenUS != 0
	return [6]part{
		{"claim", r.AskedUS, r.ClaimedUS, reported}, {"fill", r.ClaimedUS, r.CommittedUS, reported},
		{"queue", r.CommittedUS, r.DispatchedUS, true}, {"handover", r.DispatchedUS, r.StartedUS, true},
		{"compute", r.StartedUS, r.FinishedUS, true},
		{"wake", r.FinishedUS, r.WokenUS, woke},
	}
}

// whole is the known time of a request, from its start to its end.
func whole(r *stats.TracedRequest) (from, to float64) {
	from, to = r.CommittedUS, r.FinishedUS
	if r.ClaimedUS != 0 {
		from = r.AskedUS
	}
	if r.WokenUS != 0 {
		to = r.WokenUS
	}
	return from, to
}

func printSlowest(t *stats.Trace, n int) error {
	list := slices.Clone(t.Requests)
	length := func(r *stats.TracedRequest) float64 {
		from, to := whole(r)
		return to - from
	}
	slices.SortFunc(list, func(x, y stats.TracedRequest) int { return cmp.Compare(length(&y), length(&x)) })
	if list = list[:min(n, len(list))]; len(list) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "  ms in all\tclaim\tfill\tqueue\thandover\tcompute\twake\trows\tworker\tbatch\tend\tclient\t")
	for i := range list {
		r := &list[i]
		fmt.Fprintf(w, "  %.3f\t", length(r)/1e3)
		for _, p := range partsOf(r) {
			if p.known {
				fmt.Fprintf(w, "%.3f\t", (p.to-p.from)/1e3)
			} else {
				fmt.Fprint(w, "-\t")
			}
		}
		fmt.Fprintf(w, "%d\t%d\t%d\t%s\t%s\t\n", r.Rows, r.Worker, r.Batch, r.End, r.Client)
	}
	return w.Flush()
}

// event is one line of the Chrome trace format.
type event struct {
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	Phase    string         `json:"ph"`
	AtUS     float64        `json:"ts"`
	LengthUS *float64       `json:"dur,omitempty"`
	Process  int            `json:"pid"`
	Thread   int            `json:"tid"`
	ID       string         `json:"id,omitempty"`
	Scope    string         `json:"s,omitempty"`
	Args     map[string]any `json:"args,omitempty"`
}

// The two rows of tracks.
const (
	workersTrack = 1
	clientsTrack = 2
)

// traceEvents has a block per batch on its worker's track, and nested spans per request.
// Times count from the first event, since viewers may drop negative times.
func traceEvents(t *stats.Trace) []event {
	from := t.FromUS
	for i := range t.Requests {
		begun, _ := whole(&t.Requests[i])
		from = min(from, begun)
	}
	list := []event{
		{Name: "process_name", Phase: "M", Process: workersTrack, Args: map[string]any{"name": "workers of " + t.Model}},
		{Name: "process_name", Phase: "M", Process: clientsTrack, Args: map[string]any{"name": "requests of " + t.Model}},
	}
	list = append(list, batchEvents(t, from)...)
	for i := range t.Requests {
		r := &t.Requests[i]
		id := fmt.Sprint(i)
		begin := func(name string, at float64, args map[string]any) {
			list = append(list, event{
				Name: name, Category: "request", Phase: "b", AtUS: at - from, Process: clientsTrack, ID: id, Args: args,
			})
		}
		end := func(name string, at float64) {
			list = append(list, event{Name: name, Category: "request", Phase: "e", AtUS: at - from, Process: clientsTrack, ID: id})
		}
		name := "request of " + r.Client
		begun, ended := whole(r)
		args := map[string]any{"rows": r.Rows, "batch": r.Batch, "worker": r.Worker, "end": r.End}
		if r.Version > 0 {
			args["weights_version"] = r.Version
		}
		begin(name, begun, args)
		for _, p := range partsOf(r) {
			if p.known {
				begin(p.name, p.from, nil)
				end(p.name, p.to)
			}
		}
		end(name, ended)
	}
	for _, n := range t.Notes {
		list = append(list, event{Name: n.Text, Phase: "i", AtUS: max(0, n.AtUS-from), Process: workersTrack, Scope: "p"})
	}
	return list
}

// batchEvents puts the batches on tracks. Blocks of a track must not overlap, so a worker
// that runs several batches at once has several tracks.
func batchEvents(t *stats.Trace, from float64) (list []event) {
	type batch struct {
		worker, requests, rows int
		number                 uint64
		started, finished      float64
	}
	seen := map[uint64]*batch{}
	var batches []*batch
	for i := range t.Requests {
		r := &t.Requests[i]
		b := seen[r.Batch]
		if b == nil {
			b = &batch{worker: r.Worker, number: r.Batch, started: r.StartedUS, finished: r.FinishedUS}
			seen[r.Batch] = b
			batches = append(batches, b)
		}
		b.requests++
		b.rows += r.Rows
	}
	slices.SortStableFunc(batches, func(x, y *batch) int { return cmp.Compare(x.started, y.started) })
	const clock = 1.0 // µs by which two times of one clock may seem to overlap
	type track struct {
		thread int
		until  float64
	}
	tracks, threads := map[int][]*track{}, 0 // by worker
	for _, b := range batches {
		var on *track
		for _, k := range tracks[b.worker] {
			if k.until <= b.started+clock {
				on = k
				break
			}
		}
		if on == nil {
			threads++
			name := fmt.Sprintf("worker %d", b.worker)
			if n := len(tracks[b.worker]); n > 0 {
				name += fmt.Sprintf(", batch %d at once", n+1)
			}
			on = &track{thread: clientsTrack + threads} // a process number would be its main thread
			tracks[b.worker] = append(tracks[b.worker], on)
			list = append(list, event{
				Name: "thread_name", Phase: "M", Process: workersTrack, Thread: on.thread, Args: map[string]any{"name": name},
			})
		}
		start := max(b.started, on.until)
		on.until = max(start, b.finished)
		length := on.until - start
		list = append(list, event{
			Name: "batch", Phase: "X", AtUS: start - from, LengthUS: &length, Process: workersTrack, Thread: on.thread,
			Args: map[string]any{"batch": b.number, "requests": b.requests, "rows": b.rows},
		})
	}
	return list
}

func writeTrace(path string, t *stats.Trace) error {
	return writeFile(path, func(w io.Writer) error {
		return json.NewEncoder(w).Encode(map[string]any{"displayTimeUnit": "ms", "traceEvents": traceEvents(t)})
	})
}
