// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
)

// printProcesses shows the worker processes that the broker started.
func printProcesses(out io.Writer, s *stats.Broker) {
	if len(s.Processes) == 0 {
		return
	}
	fmt.Fprintf(out, "\nstarted by the broker (MPS: %s)\n", s.MPS)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  process\tpid\tgpu\tstate\tsince\trestarts\tlast end")
	for _, p := range s.Processes {
		gpu := "-"
		if p.GPU != nil {
			gpu = fmt.Sprint(*p.GPU)
		}
		fmt.Fprintf(w, "  %s\t%d\t%s\t%s\t%s\t%d\t%s\n", p.Name, p.Pid, gpu, p.State, seconds(p.SinceS), p.Restarts, p.LastEnd)
	}
	w.Flush()
}

// checkWorkers looks at the processes that a running broker started.
func checkWorkers(ctx context.Context, socket string) finding {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	d := finding{What: "workers", State: "ok"}
	_, s, err := fetchStats(ctx, socket)
	if err != nil || len(s.Processes) == 0 {
		d.Detail = "the broker starts none; declare them with [[model.worker]], or start them by hand"
		return d
	}
	up := 0
	for _, p := range s.Processes {
		if p.State == "running" {
			up++
			continue
		}
		d.State, d.Do = "note", fmt.Sprintf("%s is %s after %d restarts (%s): %s", p.Name, p.State, p.Restarts, p.LastEnd, p.Command)
	}
	d.Detail = fmt.Sprintf("%d of %d declared processes run, MPS: %s", up, len(s.Processes), s.MPS)
	return d
}
