// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
)

var update = flag.Bool("update", false, "rewrite the expected output in testdata/*.txt")

// The scripts in testdata have blocks:
//
//	at 1ms                   the time, from here on
//	arrive A rows=2          events, in order
//	----
//	batch 1 to w1: A = 2 rows (deadline)
//	wake never               the output of Decide, up to the next empty line
//
// testdata/README.md lists the events.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			must.Do(t, err)
			got := newScript().play(t, string(text))
			if *update {
				must.Do(t, os.WriteFile(file, []byte(got), 0o644))
			}
		})
	}
}

// play runs every block of text, reports differences, and returns the text with the real output.
func (s *script) play(t *testing.T, text string) string {
	var result strings.Builder
	lines := strings.Split(text, "\n")
	for i := 0; i < len(lines); {
		first := i
		var commands []string
		for ; i < len(lines) && lines[i] != "----"; i++ {
			line, _, _ := strings.Cut(lines[i], "#")
			if line = strings.TrimSpace(line); line != "" {
				commands = append(commands, line)
			}
		}
		result.WriteString(strings.Join(lines[first:i], "\n"))
		if i == len(lines) {
			if len(commands) > 0 {
				t.Errorf("line %d: no ---- after the commands", first+1)
			}
			break
		}
		i++ // ----
		expected := i
		for ; i < len(lines) && lines[i] != ""; i++ {
		}
		want := strings.Join(lines[expected:i], "\n")
		got := s.block(commands)
		if got != want && !*update {
			t.Errorf("line %d:\n%s\n---- got\n%s\n---- want\n%s", first+1, strings.Join(commands, "\n"), got, want)
		}
		result.WriteString("\n----\n" + got + "\n")
	}
	return result.String()
}

// script is the state of one script: the batcher and the names of things.
type script struct {
	b        *Batcher
	policy   policy.Policy
	now      Time
	names    []string             // of requests, by id
	requests map[string]Request   // by name
	holders  map[BatchID]WorkerID // batches that are running
	out      []string
}

func newScript() *script {
	return &script{requests: map[string]Request{}, holders: map[BatchID]WorkerID{}}
}

// block runs commands and then Decide, and returns the output.
func (s *script) block(commands []string) string {
	s.out = nil
	if strings.HasPrefix(commands[0], "run ") {
		s.run(commands[0], commands[1:])
		return strings.Join(s.out, "\n")
	}
	for _, c := range commands {
		s.command(c)
	}
	if s.b != nil {
		d := s.b.Decide(s.now)
		s.report(d, "")
		s.say("wake %s", when(d.Wake))
	}
	return strings.Join(s.out, "\n")
}

func (s *script) say(format string, args ...any) {
	s.out = append(s.out, fmt.Sprintf(format, args...))
}

func when(t Time) string {
	if t == Never {
		return "never"
	}
	return "at " + time.Duration(t).String()
}

func (s *script) report(d *Decisions, prefix string) {
	for _, e := range d.Ended {
		s.say("%s%s ended: %v", prefix, s.names[e.ID], e.Why)
	}
	for _, x := range d.Dispatches {
		s.holders[x.Batch] = x.Worker
		var names []string
		for _, id := range x.Requests {
			names = append(names, s.names[id])
		}
		shape, pad := "", ""
		if x.Dims != (Dims{}) {
			shape = " of shape " + dimsString(x.Dims)
		}
		if x.PadTo != x.Rows {
			pad = fmt.Sprintf(" padded to %d", x.PadTo)
		}
		rows := "rows"
		if x.Rows == 1 {
			rows = "row"
		}
		if s.b.settings.MaxBatchCost > 0 {
			rows += fmt.Sprintf(" of cost %d", x.Cost)
		}
		s.say("%sbatch %d to w%d: %s = %d %s%s%s (%v)", prefix, x.Batch, x.Worker,
			strings.Join(names, " "), x.Rows, rows, shape, pad, x.Why)
	}
}

func dimsString(d Dims) string {
	last := 0
	for i, size := range d {
		if size > 0 {
			last = i
		}
	}
	var sizes []string
	for _, size := range d[:last+1] {
		sizes = append(sizes, fmt.Sprint(size))
	}
	return strings.Join(sizes, "x")
}

// run plays timed commands, with workers that need the same time for every batch, until nothing more
// happens.
func (s *script) run(header string, timed []string) {
	_, o := parse(header)
	each := Time(o.duration("each"))
	type finish struct {
		at    Time
		batch BatchID
	}
	var finishes []finish // in order, because every batch takes as long
	wake := Never
	for {
		next := wake
		if len(timed) > 0 {
			next = min(next, commandTime(timed[0]))
		}
		if len(finishes) > 0 {
			next = min(next, finishes[0].at)
		}
		if next == Never {
			s.say("%v everything ended", time.Duration(s.now))
			return
		}
		s.now = next
		prefix := fmt.Sprintf("%v ", time.Duration(s.now))
		for len(finishes) > 0 && finishes[0].at == next {
			s.say("%sbatch %d done", prefix, finishes[0].batch)
			s.command(fmt.Sprintf("done %d", finishes[0].batch))
			finishes = finishes[1:]
		}
		for len(timed) > 0 && commandTime(timed[0]) == next {
			_, command, _ := strings.Cut(timed[0], " ")
			s.command(command)
			timed = timed[1:]
		}
		d := s.b.Decide(s.now)
		s.report(d, prefix)
		for _, x := range d.Dispatches {
			finishes = append(finishes, finish{s.now + each, x.Batch})
		}
		wake = d.Wake
	}
}

func commandTime(line string) Time {
	at, _, _ := strings.Cut(line, " ")
	d, err := time.ParseDuration(at)
	if err != nil {
		panic(err)
	}
	return Time(d)
}

// options are the words of a command: key=value, or a word alone.
type options map[string]string

func parse(line string) (words []string, o options) {
	o = options{}
	for _, word := range strings.Fields(line) {
		if key, value, found := strings.Cut(word, "="); found {
			o[key] = value
		} else {
			words = append(words, word)
		}
	}
	return words, o
}

func (o options) has(key string) bool { return o[key] != "" }

func (o options) int(key string) int { return int(number(o[key])) }

func (o options) duration(key string) time.Duration {
	if !o.has(key) {
		return 0
	}
	d, err := time.ParseDuration(o[key])
	if err != nil {
		panic(err)
	}
	return d
}

func number(text string) uint64 {
	if text == "" {
		return 0
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}
