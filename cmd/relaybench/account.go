// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// account is where the CPU time of a turn went, and how full batches were:
// what explains a figure.
type account struct {
	cpu           map[string]time.Duration // by kind of process
	batches, rows map[string]uint64        // by broker
}

// accountNow is what has been used so far.
func (b *bed) accountNow(list []*producer) account {
	a := account{map[string]time.Duration{}, map[string]uint64{}, map[string]uint64{}}
	for _, c := range b.running {
		if d, err := testbed.CPUTime(c.Process.Pid); err == nil {
			a.cpu[b.kinds[c]] += d
		}
	}
	for _, p := range list {
		if d, err := testbed.CPUTime(p.cmd.Process.Pid); err == nil {
			a.cpu["producers"] += d
		}
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
			parts = append(parts, fmt.Sprintf("%s %.1f", kind, us))
		}
	}
	sort.Strings(parts)
	text := "µs of CPU a call: " + strings.Join(parts, ", ")
	for host, n := range a.batches {
		if n -= then.batches[host]; n > 0 {
			text += fmt.Sprintf("; rows a batch %s %.1f", host, float64(a.rows[host]-then.rows[host])/float64(n))
		}
	}
	return text
}
