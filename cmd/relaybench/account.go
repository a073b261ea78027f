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
)

// account is where the CPU time of a turn went, how often threads slept, and how
// full batches were: what explains a figure.
type account struct {
	cpu           map[string]time.Duration // by kind of process
	sleeps        map[string]uint64        // the same
	batches, rows map[string]uint64        // by broker
}

// accountNow is what has been used so far.
func (b *bed) accountNow(list []*producer) account {
	a := account{map[string]time.Duration{}, map[string]uint64{}, map[string]uint64{}, map[string]uint64{}}
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
		s, err := admin.New(b.socket(host)).Stats(b.ctx)
		if err != nil {
			continue
		}
		for i := range s.Models {
			if m := &s.Models[i]; m.Name == "small" {
				a.batches[host], a.rows[host] = m.Batches, m.Rows
			}
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
	for host, n := range a.batches {
		if n -= then.batches[host]; n > 0 {
			text += fmt.Sprintf("; rows a batch %s %.1f", host, float64(a.rows[host]-then.rows[host])/float64(n))
		}
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
