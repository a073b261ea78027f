// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/stats"
)

// account is where the CPU time of a turn went, how often threads slept, how
// full batches were and how long requests were where: what explains a figure.
type account struct {
	cpu    map[string]time.Duration // by kind of process
	sleeps map[string]uint64        // the same
	models map[string]stats.Model   // by broker
}

// accountNow is what has been used so far.
func (b *bed) accountNow(list []*producer) account {
	a := account{map[string]time.Duration{}, map[string]uint64{}, map[string]stats.Model{}}
	add := func(kind string, pid int) {
		if d, err := testbed.CPUTime(pid); err == nil {
			a.cpu[kind] += d
			a.sleeps[kind] += sleeps(pid)
		}
	}
	for _, c := range b.running {
		add(b.kinds[c], c.Process.Pid)
	}
	for _, p := range list {
		add("producers", p.cmd.Process.Pid)
	}
	for _, host := range []string{"local", "far0"} {
		if s, err := admin.New(b.socket(host)).Stats(b.ctx); err == nil && s.Model("small") != nil {
			a.models[host] = *s.Model("small")
		}
	}
	return a
}

// since says what the calls from then until now took.
func (a account) since(then account, calls float64) string {
	var parts []string
	for kind, d := range a.cpu {
		if us := float64((d - then.cpu[kind]).Microseconds()) / calls; us >= 0.05 {
			parts = append(parts, fmt.Sprintf("%s %.1f (%.2f)", kind, us, float64(a.sleeps[kind]-then.sleeps[kind])/calls))
		}
	}
	sort.Strings(parts)
	text := "µs of CPU a call (sleeps of threads): " + strings.Join(parts, ", ")
	for host, m := range a.models {
		before := then.models[host]
		n := m.Batches - before.Batches
		if n == 0 {
			continue
		}
		mean := func(now, before stats.Histogram) float64 {
			return 1e6 * (now.SumS - before.SumS) / float64(max(now.Count-before.Count, 1))
		}
		now, then := &m.Histograms, &before.Histograms
		text += fmt.Sprintf("; %s %.1f rows a batch, requests %.0f µs in the queue, %.0f until the worker has them, %.0f there", host, float64(m.Rows-before.Rows)/float64(n),
			mean(now.Queue, then.Queue), mean(now.Dispatch, then.Dispatch), mean(now.Compute, then.Compute))
	}
	return text
}

// sleeps is how often threads of a process have gone to sleep.
func sleeps(pid int) (n uint64) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	for _, file := range files {
		text, _ := os.ReadFile(file) // the thread may have ended just now
		if _, rest, found := strings.Cut(string(text), "\nvoluntary_ctxt_switches:"); found {
			var of uint64
			_, _ = fmt.Sscan(rest, &of)
			n += of
		}
	}
	return n
}
