// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// row sums the slices of a part at one commit on one machine.
type row struct {
	done        // the first; its Result and Seconds are sums
	slices      int
	first, last uint64 // seeds
}

// notes is the heading under which people write. It and everything below stays.
const notes = "\n## Notes\n"

// writeTable writes a file from a file of results. Parts without results keep
// the rows that the file has.
func writeTable(path, results string) error {
	all, err := readDone(results)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	before := string(text)
	var t strings.Builder
	t.WriteString(`# Torture: what the long runs reached

Written by ` + "`make torture`" + ` from the results of the slices that really ran: each row says at which commit;` +
		` what was not run says so. What the parts are, and how they are run, is in [../reliability.md](../reliability.md#the-long-runs).

| part | wanted | ran | seeds | passed | failed | not judged | seen by honest clients | times | took | commit | date | machine |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
`)
	failures := ""
	for i := range parts {
		p := &parts[i]
		rows, kept := p.rows(all), p.rowsBefore(before)
		switch {
		case len(rows) == 0 && kept != "":
			t.WriteString(kept)
		case len(rows) == 0:
			fmt.Fprintf(&t, "| %s: %s | %s %s | not run | | | | | | | | | | |\n", p.name, p.about, number(p.target), p.unit)
		}
		for _, r := range rows {
			s := &r.Result
			fmt.Fprintf(&t, "| %s: %s | %s %s | %s | %s | %s | %s | %s | %s | %s | %v | %s | %s | %s |\n", p.name, p.about, number(p.target), p.unit,
				number(s.Events), r.seeds(p), number(s.Passed), number(s.Failed), number(s.NotJudged), r.seen(p), r.times(),
				(time.Duration(r.Seconds) * time.Second).String(), r.Commit, r.Began.Format(time.DateOnly), r.Machine)
			for _, f := range s.Failures {
				failures += fmt.Sprintf("\nFAILED, %s at %s: %s\n", p.name, r.Commit, f)
			}
		}
	}
	t.WriteString("\nA slice of a part is run alone with, for example (its seed is its number):\n\n```sh\n")
	for i := range parts {
		command, _, _ := strings.Cut(strings.Join(parts[i].command(parts[i].slices()[0]), " "), " --report")
		fmt.Fprintf(&t, "bin/%s\n", command)
	}
	t.WriteString("```\n" + failures)
	if at := strings.Index(before, notes); at >= 0 {
		t.WriteString(before[at:])
	}
	return os.WriteFile(path, []byte(t.String()), 0o644)
}

// rowsBefore are the rows of the part in a table that was written before.
func (p *part) rowsBefore(before string) (rows string) {
	for line := range strings.Lines(before) {
		if strings.HasPrefix(line, "| "+p.name+": ") {
			rows += line
		}
	}
	return rows
}

// rows sums the part's slices by commit and machine, in the order in which they
// ran.
func (p *part) rows(all []done) (rows []*row) {
	for _, d := range all {
		if d.Slice.Part != p.name {
			continue
		}
		at := slices.IndexFunc(rows, func(r *row) bool { return r.Commit == d.Commit && r.Machine == d.Machine })
		if at < 0 {
			at = len(rows)
			rows = append(rows, &row{first: d.Slice.Seed, done: done{Commit: d.Commit, Machine: d.Machine, Began: d.Began,
				Result: Result{Named: map[string]int{}, Spans: map[string]Span{}}}})
		}
		r := rows[at]
		r.slices++
		r.Seconds += d.Seconds
		r.first, r.last = min(r.first, d.Slice.Seed), max(r.last, d.Slice.Seed+uint64(d.Slice.Events)-1)
		r.Result.add(&d.Result)
	}
	return rows
}

func (r *Result) add(o *Result) {
	r.Events += o.Events
	r.Passed, r.Failed, r.NotJudged = r.Passed+o.Passed, r.Failed+o.Failed, r.NotJudged+o.NotJudged
	r.Answers += o.Answers
	r.Failures = append(r.Failures, o.Failures...)
	for name, n := range o.Named {
		r.Named[name] += n
	}
	for name, s := range o.Spans { // those of the slowest slice
		old := r.Spans[name]
		r.Spans[name] = Span{N: old.N + s.N, P50: max(old.P50, s.P50), P99: max(old.P99, s.P99), Max: max(old.Max, s.Max)}
	}
}

func (r *row) seeds(p *part) string {
	switch {
	case p.unit == "seeds":
		return fmt.Sprintf("%s to %s", number(int(r.first)), number(int(r.last)))
	case r.slices == 1:
		return fmt.Sprintf("1 slice from %d on", r.first)
	}
	return fmt.Sprintf("%d slices from %d on", r.slices, r.first)
}

func (r *row) seen(p *part) string {
	if p.unit == "seeds" {
		if r.Result.Answers == 0 {
			return ""
		}
		return number(r.Result.Answers) + " requests"
	}
	text := number(r.Result.Answers) + " right"
	for _, name := range slices.Sorted(maps.Keys(r.Result.Named)) {
		text += fmt.Sprintf(", %s %s", number(r.Result.Named[name]), name)
	}
	return text
}

func (r *row) times() string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(r.Result.Spans)) {
		s := r.Result.Spans[name]
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
