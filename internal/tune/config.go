// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/ringbatch/ringbatch/broker"
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

// config is the broker's file for a setting: what the worker declares, with
// other numbers.
func (r *Report) config(mps bool, instances, maxBatchSize int) string {
	var b strings.Builder
	if mps {
		b.WriteString("mps = true\n\n")
	}
	d := &r.declared
	fmt.Fprintf(&b, "[[model]]\nname = %s\ninputs = %s\noutputs = %s\nmax_batch_size = %d\n", quoted(d.name),
		list(tensor.SpecTexts(d.signature.Inputs), quoted), list(tensor.SpecTexts(d.signature.Outputs), quoted), maxBatchSize)
	for _, key := range slices.Sorted(maps.Keys(d.policy)) {
		if r.differs(key, d.policy[key]) && (key != "slots" || r.keepsSlots(r.maxSize())) {
			fmt.Fprintf(&b, "%s = %s\n", quoted(key), quoted(d.policy[key]))
		}
	}
	b.WriteString("\n" + workerTable("[[model.worker]]", r.options, instances))
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
	c := r.Choice
	var b strings.Builder
	fmt.Fprintf(&b, "# Made by ringbatch tune for %s.\n", r.goalText())
	if m := r.find(*c).Measured; m != nil {
		fmt.Fprintf(&b, "# Measured: %s requests/s, mean %s ms, p99 %s ms%s.\n", number(m.PerSecond), number(m.MeanMS), number(m.P99MS), r.load(r.find(*c)))
	}
	if r.Unfinished {
		b.WriteString("# It was interrupted: other settings may be better.\n")
	}
	if r.Goal.P99 > 0 {
		fmt.Fprintf(&b, "# latency_goal = %q in the model would fill batches as far as p99 allows, and refuse what could not keep it.\n", r.Goal.P99)
	}
	b.WriteString("\n" + r.config(c.MPS, c.Instances, c.MaxBatchSize))
	return b.String()
}
