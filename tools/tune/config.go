// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/tools/svgchart"
)

// words splits a command into words. A command with other characters runs in a shell,
// which the worker replaces if possible.
func words(command string) []string {
	switch {
	case strings.ContainsAny(command, ";|&\n"):
		return []string{"sh", "-c", command}
	case strings.ContainsAny(command, "\"'`$<>()*?[]#~=%!{}\\"):
		return []string{"sh", "-c", "exec env " + command}
	}
	return strings.Fields(command)
}

// workerTable is a worker of the configuration file.
type workerTable struct {
	Command   []string `toml:"command"`
	Instances int      `toml:"instances"`
	GPUs      []int    `toml:"gpus,omitempty"`
}

func (o *Options) worker(instances int) []workerTable {
	return []workerTable{{words(o.Command), instances, o.GPUs}}
}

// encoded is a value as TOML.
func encoded(v any) string {
	var b strings.Builder
	e := toml.NewEncoder(&b)
	e.Indent = ""
	if err := e.Encode(v); err != nil {
		panic(err) // texts and numbers can be encoded
	}
	return b.String()
}

// config is the broker's file for a setting: the worker's own declaration, with other numbers.
func (r *Report) config(s Setting) string {
	d := &r.declared
	model := map[string]any{
		"name": d.name, "inputs": tensor.SpecTexts(d.signature.Inputs), "outputs": tensor.SpecTexts(d.signature.Outputs),
		"max_batch_size": s.MaxBatchSize, "worker": r.options.worker(s.Instances),
	}
	for key, value := range d.policy {
		if r.differs(key, value) && (key != "slots" || r.keepsSlots()) {
			model[key] = value
		}
	}
	file := map[string]any{"model": []map[string]any{model}}
	if s.MPS {
		file["mps"] = true
	}
	return encoded(file)
}

// differs reports whether a setting of the worker is neither a default nor tuned.
func (r *Report) differs(key, value string) bool {
	switch key {
	case "max_batch_size", "wait_time", "latency_goal", "preferred_batch_sizes":
		return false
	case "slots": // the broker fills in its default
		return value != strconv.Itoa(broker.DefaultSlots)
	}
	plain, err := policy.Policy{}.Resolve(r.declared.signature.Inputs)
	return err == nil && plain.Policy(r.declared.signature.Inputs)[key] != value
}

// TOML is the configuration of the choice, for `ringbatch broker --config`.
func (r *Report) TOML() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Made by ringbatch tune for %s.\n# %s.\n", r.goalText(), r.Why)
	if r.Unfinished {
		b.WriteString("# It was interrupted: other settings may be better.\n")
	}
	if r.Goal.P99 > 0 {
		fmt.Fprintf(&b, "# latency_goal = %q in the model would fill batches as far as p99 allows, and refuse the rest.\n", r.Goal.P99)
	}
	return b.String() + "\n" + r.config(*r.Choice)
}

func number(x float64) string { return svgchart.Number(x) }

func (r *Report) goalText() string {
	text := "the most requests per second"
	if r.Goal.Rate > 0 {
		text = fmt.Sprintf("the least mean latency at %s requests/s", number(r.Goal.Rate))
	}
	if r.Goal.P99 > 0 {
		text += fmt.Sprintf(" with p99 within %v", r.Goal.P99)
	}
	return text
}

func (r *Report) figuresText(c *Candidate) string {
	m := c.Measured
	text := fmt.Sprintf("%s requests/s, mean %s ms, p99 %s ms", number(m.PerSecond), number(m.MeanMS), number(m.P99MS))
	if c.Load > 0 && c.Load != mostInFlight {
		text += fmt.Sprintf(" (with %g full batches in flight for each worker)", c.Load)
	}
	return text
}

// WriteText writes the table and the recommendation.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n\n%9s %6s %5s %9s %11s %9s %9s %8s\n", r.Model, r.goalText(),
		"instances", "batch", "MPS", "in flight", "requests/s", "mean ms", "p99 ms", "windows")
	for _, c := range r.Candidates {
		fmt.Fprintf(&b, "%9d %6d %5s %9s", c.Instances, c.MaxBatchSize, map[bool]string{true: "on"}[c.MPS], number(c.Load))
		if m := c.Measured; m != nil {
			fmt.Fprintf(&b, " %11s %9s %9s %8d", number(m.PerSecond), number(m.MeanMS), number(m.P99MS), m.Windows)
		}
		if r.Choice != nil && *r.Choice == c.Setting {
			b.WriteString("  ◄")
		}
		if c.Note != "" {
			b.WriteString("  " + c.Note)
		}
		b.WriteByte('\n')
	}
	for _, note := range r.Notes {
		fmt.Fprintf(&b, "note: %s\n", note)
	}
	if r.Unfinished {
		b.WriteString("interrupted: other settings may be better\n")
	}
	if r.Choice != nil {
		fmt.Fprintf(&b, "\nrecommended: %s (found in %.0f s)\nwhy: %s\n", r.Choice, r.Seconds, r.Why)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
