// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
)

func TestAWorkerIsWaitedForWhileTheBrokerStartsOne(t *testing.T) {
	model := func(states ...string) (m stats.Model) {
		m.Name = "m"
		for i, state := range states {
			m.Workers = append(m.Workers, stats.Worker{Pid: i + 1, State: state})
		}
		return m
	}
	process := func(state string, pid int) stats.Process { return stats.Process{Model: "m", State: state, Pid: pid} }
	failing, another, unknown := process("waiting", 0), process("waiting", 0), process("running", 7)
	failing.FailedStarts, another.Model, unknown.Model = DeadLives, "another", ""
	gateway, wrapper := unknown, process("running", 8)
	gateway.Client, wrapper.Sessions = true, 1
	const ever, brief = time.Duration(0), time.Minute
	for name, c := range map[string]struct {
		model     stats.Model
		processes []stats.Process
		patience  Patience
		want      time.Duration // patience that is over after an hour
	}{
		"a worker":                    {model("idle"), nil, UsualPatience, ever},
		"nothing":                     {model(), nil, UsualPatience, UsualPatience.Time},
		"nothing, patient for ever":   {model(), nil, Patience{}, ever},
		"waits to be started again":   {model(), []stats.Process{process("waiting", 0)}, UsualPatience, UsualPatience.Starting},
		"has started":                 {model(), []stats.Process{process("running", 7)}, Patience{Time: brief}, ever},
		"has started, may serve it":   {model(), []stats.Process{unknown}, Patience{Time: brief}, ever},
		"a gateway":                   {model(), []stats.Process{gateway}, UsualPatience, UsualPatience.Time},
		"starts for too long":         {model(), []stats.Process{process("running", 7)}, Patience{brief, 2 * brief}, 2 * brief},
		"stopped":                     {model(), []stats.Process{process("stopped", 0)}, UsualPatience, UsualPatience.Time},
		"fails again and again":       {model(), []stats.Process{failing}, UsualPatience, UsualPatience.Time},
		"another model's":             {model(), []stats.Process{another}, UsualPatience, UsualPatience.Time},
		"its worker takes no batches": {model("quarantined"), []stats.Process{wrapper}, UsualPatience, UsualPatience.Time},
		"one is idle, another comes":  {model("quarantined"), []stats.Process{wrapper, process("waiting", 0)}, Patience{Time: brief}, ever},
	} {
		begin := time.Unix(0, 0)
		n := absence{patience: c.patience, worker: begin, start: begin}
		got := n.exceeded(&stats.Broker{Models: []stats.Model{c.model}, Processes: c.processes}, "m", begin.Add(time.Hour))
		if got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
