// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/chaos"
)

// row is what a part came to at one commit on one machine.
type row struct {
	part, commit, machine string
	slices, events        int
	first, last           uint64 // seeds
	passed, failed        int
	unjudged, answers     int
	named                 map[string]int
	spans                 map[string]chaos.Span
	failures              []string
	seconds               float64
	longest               int // events of the longest slice
	began                 time.Time
}

// WriteTable writes what really ran, from files of results. Parts that they say
// nothing about keep the rows that the file has, and so do its notes.
func WriteTable(path string, parts []Part, files ...string) error {
	all, err := readDone(files...)
	if err != nil {
		return err
	}
	before, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(path, []byte(table(parts, all, string(before))), 0o644)
}

// notes is the heading under which people write; it and all below it is theirs.
const notes = "\n## Notes\n"

func table(parts []Part, all []Done, before string) string {
	var t strings.Builder
	t.WriteString(`# Torture: what the long runs reached

Written by ` + "`make torture`" + ` from the results of the slices that really ran: each row says at which commit; what was not run says so. What the parts are, and how they are run, is in [../reliability.md](../reliability.md#the-long-runs).

| part | wanted | ran | seeds | passed | failed | not judged | seen by honest clients | times | took | commit | date | machine |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
`)
	for i := range parts {
		p := &parts[i]
		rows := rowsOf(p.Name, all)
		kept := rowsBefore(p.Name, before)
		switch {
		case len(rows) == 0 && kept != "":
			t.WriteString(kept)
		case len(rows) == 0:
			fmt.Fprintf(&t, "| %s: %s | %s %s | not run | | | | | | | | | | |\n", p.Name, p.About, number(p.Target), p.Unit)
		}
		for _, r := range rows {
			ran := number(r.events)
			if p.Name == "soak" && r.slices > 1 {
				ran += fmt.Sprintf(" in %d runs, the longest %d", r.slices, r.longest)
			}
			fmt.Fprintf(&t, "| %s: %s | %s %s | %s | %s | %s | %s | %s | %s | %s | %v | %s | %s | %s |\n", p.Name, p.About, number(p.Target), p.Unit, ran,
				r.seeds(p), number(r.passed), number(r.failed), number(r.unjudged), r.seen(p), r.times(), (time.Duration(r.seconds) * time.Second).String(), r.commit, r.began.Format(time.DateOnly), r.machine)
		}
	}
	t.WriteString("\nA slice of a part is run alone with, for example (its seed is its number):\n\n```sh\n")
	for i := range parts {
		command, _, _ := strings.Cut(strings.Join(parts[i].command(parts[i].slices()[0]), " "), " --report")
		fmt.Fprintf(&t, "bin/%s\n", command)
	}
	t.WriteString("```\n")
	for _, r := range rowsOf("", all) {
		for _, f := range r.failures {
			fmt.Fprintf(&t, "\nFAILED, %s at %s: %s\n", r.part, r.commit, f)
		}
	}
	if at := strings.Index(before, notes); at >= 0 {
		t.WriteString(before[at:])
	}
	return t.String()
}

// rowsBefore are the rows of a part in a table that was written before.
func rowsBefore(part, before string) (rows string) {
	for line := range strings.Lines(before) {
		if strings.HasPrefix(line, "| "+part+": ") {
			rows += line
		}
	}
	return rows
}

// rowsOf sums the slices of a part, or of all parts, by commit and machine, in
// the order in which they were run.
func rowsOf(part string, all []Done) (rows []*row) {
	for i := range all {
		d := &all[i]
		if part != "" && d.Slice.Part != part {
			continue
		}
		at := slices.IndexFunc(rows, func(r *row) bool { return r.part == d.Slice.Part && r.commit == d.Commit && r.machine == d.Machine })
		if at < 0 {
			rows = append(rows, &row{part: d.Slice.Part, commit: d.Commit, machine: d.Machine, began: d.Began, first: d.Slice.Seed,
				named: map[string]int{}, spans: map[string]chaos.Span{}})
			at = len(rows) - 1
		}
		rows[at].add(d)
	}
	return rows
}

func (r *row) add(d *Done) {
	r.slices++
	r.events += d.Result.Events
	r.longest = max(r.longest, d.Result.Events)
	r.first, r.last = min(r.first, d.Slice.Seed), max(r.last, d.Slice.Seed+uint64(d.Slice.Events)-1)
	r.passed, r.failed, r.unjudged = r.passed+d.Result.Passed, r.failed+d.Result.Failed, r.unjudged+d.Result.NotJudged
	r.answers += d.Result.Answers
	r.seconds += d.Seconds
	r.failures = append(r.failures, d.Result.Failures...)
	for name, n := range d.Result.Named {
		r.named[name] += n
	}
	for name, s := range d.Result.Spans {
		old := r.spans[name]
		r.spans[name] = chaos.Span{N: old.N + s.N, P50: max(old.P50, s.P50), P99: max(old.P99, s.P99), Max: max(old.Max, s.Max)}
	}
}

func (r *row) seeds(p *Part) string {
	if p.Unit == "seeds" {
		return fmt.Sprintf("%s to %s", number(int(r.first)), number(int(r.last)))
	}
	if r.slices == 1 {
		return fmt.Sprint(r.first)
	}
	return fmt.Sprintf("%d slices from %d on", r.slices, r.first)
}

func (r *row) seen(p *Part) string {
	if p.Unit == "seeds" {
		if r.answers == 0 {
			return ""
		}
		return number(r.answers) + " requests"
	}
	text := number(r.answers) + " right"
	for _, name := range slices.Sorted(maps.Keys(r.named)) {
		text += fmt.Sprintf(", %s %s", number(r.named[name]), name)
	}
	return text
}

// times are those of the slowest slice.
func (r *row) times() string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(r.spans)) {
		s := r.spans[name]
		all = append(all, fmt.Sprintf("%s (%s): p50 %.1f, p99 %.1f, max %.1f ms", name, number(s.N), s.P50, s.P99, s.Max))
	}
	return strings.Join(all, "; ")
}

// number with commas.
func number(n int) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
