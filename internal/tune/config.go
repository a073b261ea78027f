// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/svgchart"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/tensor"
)

// words make a command of the text: of plain words as they are, else by a shell,
// which the worker takes the place of where that is possible.
func words(command string) []string {
	switch {
	case strings.ContainsAny(command, ";|&\n"):
		return []string{"sh", "-c", command}
	case strings.ContainsAny(command, "\"'`$<>()*?[]#~=%!{}\\"):
		return []string{"sh", "-c", "exec env " + command}
	}
	return strings.Fields(command)
}

// quoted is a text as TOML has it.
func quoted(text string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, c := range text {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteRune(c)
		case c < ' ' || c == 0x7f:
			fmt.Fprintf(&b, "\\u%04X", c)
		default:
			b.WriteRune(c)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func list[T any](items []T, text func(T) string) string {
	var texts []string
	for _, x := range items {
		texts = append(texts, text(x))
	}
	return "[" + strings.Join(texts, ", ") + "]"
}

// workerTable declares the command.
func workerTable(head string, o *Options, instances int) string {
	text := fmt.Sprintf("%s\ncommand = %s\ninstances = %d\n", head, list(words(o.Command), quoted), instances)
	if len(o.GPUs) > 0 {
		text += fmt.Sprintf("gpus = %s\n", list(o.GPUs, strconv.Itoa))
	}
	return text
}

// config is the broker's file for a setting: the worker's own declaration, with other numbers.
func (r *Report) config(s Setting) string {
	var b strings.Builder
	if s.MPS {
		b.WriteString("mps = true\n\n")
	}
	d := &r.declared
	fmt.Fprintf(&b, "[[model]]\nname = %s\ninputs = %s\noutputs = %s\nmax_batch_size = %d\n", quoted(d.name),
		list(tensor.SpecTexts(d.signature.Inputs), quoted), list(tensor.SpecTexts(d.signature.Outputs), quoted), s.MaxBatchSize)
	for _, key := range slices.Sorted(maps.Keys(d.policy)) {
		if r.differs(key, d.policy[key]) && (key != "slots" || r.keepsSlots()) {
			fmt.Fprintf(&b, "%s = %s\n", quoted(key), quoted(d.policy[key]))
		}
	}
	b.WriteString("\n" + workerTable("[[model.worker]]", r.options, s.Instances))
	return b.String()
}

// differs tells that the worker asked for something else than the default, and
// that it is not what is tuned.
func (r *Report) differs(key, value string) bool {
	switch key {
	case "max_batch_size", "wait_time", "latency_goal", "preferred_batch_sizes":
		return false
	case "slots": // which the broker has filled in, if nobody asked
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
		fmt.Fprintf(&b, "# latency_goal = %q in the model would fill batches as far as p99 allows, and refuse requests that could not keep it.\n", r.Goal.P99)
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
	text := fmt.Sprintf("%s requests/s, mean %s ms, p99 %s ms", number(c.Measured.PerSecond), number(c.Measured.MeanMS), number(c.Measured.P99MS))
	if c.Load > 0 && c.Load != mostInFlight {
		text += fmt.Sprintf(" (with %g full batches in flight for each worker)", c.Load)
	}
	return text
}

// WriteText writes the table and the recommendation.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n\n%9s %6s %5s %9s %11s %9s %9s %8s\n", r.Model, r.goalText(), "instances", "batch", "MPS", "in flight", "requests/s", "mean ms", "p99 ms", "windows")
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
