// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/printable"
)

func runTop(ctx context.Context, args []string) error {
	f := flags("top", " [MODEL]", "Show models and workers as a table, live, until Ctrl-C.\n"+
		"`ringbatch dashboard` serves a page that shows more.", "  ringbatch top\n  ringbatch top resnet50 --interval 200ms\n")
	socket := socketFlag(f)
	interval := f.Duration("interval", time.Second, "how often to ask the broker, at least 100ms")
	if err := parse(f, args, 0, 1); err != nil {
		return err
	}
	if *interval < 100*time.Millisecond {
		return fmt.Errorf("%w: --interval is %v, must be at least 100ms", errUsage, *interval)
	}
	const patience = 5 * time.Second // with a broker that does not answer
	broker := admin.New(*socket)
	t := top{socket: broker.Socket(), only: f.Arg(0)}
	for {
		asked, cancel := context.WithTimeout(ctx, patience)
		s, err := broker.Stats(asked)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if t.err = err; err == nil {
			t.now, t.at = s, time.Now()
		}
		if err := show(t.lines()); err != nil {
			return nil // the terminal was closed
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(*interval):
		}
	}
}

// show prints the lines. In a terminal they take the place of the ones before; lines without room are left out.
func show(lines []string) error {
	size, err := unix.IoctlGetWinsize(1, unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 {
		_, err := fmt.Println(strings.Join(lines, "\n") + "\n")
		return err
	}
	lines = lines[:min(len(lines), int(size.Row)-1)]
	for i, line := range lines {
		if text := []rune(line); len(text) > int(size.Col) {
			lines[i] = string(text[:size.Col-1]) + "…"
		}
	}
	_, err = os.Stdout.WriteString("\x1b[H" + strings.Join(lines, "\x1b[K\n") + "\x1b[K\n\x1b[J")
	return err
}

// top is the table. It keeps the last answer while the broker does not answer.
type top struct {
	socket, only string
	now          *stats.Broker // nil until the first answer
	at           time.Time     // of that answer
	err          error         // of the last question
}

func (t *top) lines() []string {
	const windowSeconds = 10
	switch {
	case t.now == nil:
		return []string{"ringbatch  " + t.socket, printable.Text(fmt.Sprintf("no answer from the broker; trying again: %v", t.err), 4096)}
	case len(t.now.Models) == 0:
		return []string{"no models yet: start a worker, or declare one with --config or --model"}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "ringbatch  broker pid %d, up %s%s  %s  last %d s\n", t.now.Pid, seconds(t.now.UptimeS),
		map[bool]string{true: ", draining"}[t.now.Draining], t.socket, windowSeconds)
	if t.err != nil {
		fmt.Fprintf(&b, "no answer since %s, trying again: %s\n", t.at.Format(time.TimeOnly), printable.Text(t.err.Error(), 4096))
	}
	models := slices.DeleteFunc(slices.Clone(t.now.Models), func(m stats.Model) bool { return t.only != "" && m.Name != t.only })
	slices.SortFunc(models, func(a, b stats.Model) int { return strings.Compare(a.Name, b.Name) })
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\nmodel\treq/s\trows/s\tp50 ms\tp99 ms\trows/batch\tbusy\tqueue\tring\tfailed/s\tworkers\tclients")
	for i := range models {
		m := &models[i]
		x := m.Window(windowSeconds)
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.2f\t%.2f\t%.2f\t%.0f%%\t%d\t%.0f%%\t%.2f\t%d\t%d", printable.Text(m.Name, 40), x.RequestsPerS,
			x.RowsPerS, x.Latency.P50, x.Latency.P99, x.RowsPerBatch, 100*x.Busy, m.QueueLength,
			100*float64(m.SlotsQueued+m.SlotsRunning+m.SlotsHeld)/float64(max(1, m.Slots)), x.FailedPerS, m.ReadyWorkers, m.Clients)
		for i := range t.now.Weights {
			if v := &t.now.Weights[i]; v.Model == m.Name {
				fmt.Fprintf(w, "  %s", v)
			}
		}
		switch s := m.Staffing; {
		case s.IsAsleep():
			fmt.Fprintf(w, "  %s: %s", s.State, s.Why)
		case m.ReadyWorkers == 0:
			fmt.Fprintf(w, "  not ready: %s", m.NotReady)
		}
		fmt.Fprintln(w)
	}
	w.Flush()
	fmt.Fprintln(w, "\nworker\tpid\tgpu\tstate\tbatches\trestarts\tmodel")
	for i := range models {
		for _, k := range models[i].Workers {
			fmt.Fprintf(w, "%s #%d\t%d\t%s\t%s\t%d\t%d\t%s\n", printable.Text(k.Name, 40), k.ID, k.Pid, printable.Text(k.GPU, 40), k.Doing(),
				k.Batches, k.Restarts, printable.Text(models[i].Name, 40))
		}
	}
	w.Flush()
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}
