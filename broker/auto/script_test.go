// SPDX-License-Identifier: Apache-2.0

package auto

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
)

var update = flag.Bool("update", false, "write what the scripts print into testdata")

// Each script in testdata is a list of commands, ----, and their output:
//
//	model max=N [wait=D] [goal=D] [workers=N] cost=FIXED+ROW [shared]   a new model; shared: workers slow each other down
//	cost FIXED+ROW                                                     batches cost something else from now on
//	load RATE for D                                                    Poisson arrivals; prints the plan, and the mean latency
//	arrive [D]                                                         a request, with a deadline; prints whether it is late
//	at D                                                               time goes on
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			must.Do(t, err)
			commands, want, _ := strings.Cut(string(text), "----\n")
			got := runScript(t, commands)
			if *update {
				must.Do(t, os.WriteFile(file, []byte(commands+"----\n"+got), 0o644))
			} else if got != want {
				t.Errorf("got\n%swant\n%s", got, want)
			}
		})
	}
}

func runScript(t *testing.T, commands string) string {
	var w *world
	var out strings.Builder
	rng := newRand()
	for _, line := range strings.Split(commands, "\n") {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		switch fields[0] {
		case "model":
			w = scriptModel(t, fields[1:])
		case "cost":
			w.cost = scriptCost(t, fields[1], false)
		case "load":
			rate, _ := strconv.ParseFloat(fields[1], 64)
			latency, answers := w.latency, w.answers
			w.poisson(rng, rate, duration(t, fields[3]))
			fmt.Fprintf(&out, "%s: ", line)
			if p := w.plan(); p.oneAtATime {
				out.WriteString("one at a time")
			} else {
				fmt.Fprintf(&out, "wait %v", time.Duration(p.wait))
			}
			mean := time.Duration((w.latency - latency) / Time(w.answers-answers))
			fmt.Fprintf(&out, ", mean latency %v\n", mean.Round(100*time.Microsecond))
		case "arrive":
			budget := Time(0)
			if len(fields) > 1 {
				budget = duration(t, fields[1])
			}
			err := w.arrive(budget)
			w.runUntil(w.now)
			fmt.Fprintf(&out, "%v %s: %v\n", time.Duration(w.now), line, err)
		case "at":
			w.runUntil(duration(t, fields[1]))
		default:
			t.Fatalf("unknown command %q", line)
		}
	}
	return out.String()
}

func scriptModel(t *testing.T, fields []string) *world {
	s, workers, cost, shared := autoSettings(0), 1, "", false
	for _, field := range fields {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "max":
			s.MaxBatchSize, _ = strconv.Atoi(value)
		case "wait":
			s.WaitTime = time.Duration(duration(t, value))
		case "goal":
			s.LatencyGoal = time.Duration(duration(t, value))
		case "workers":
			workers, _ = strconv.Atoi(value)
		case "cost":
			cost = value
		case "shared":
			shared = true
		default:
			t.Fatalf("unknown setting %q", field)
		}
	}
	return newWorld(t, s, workers, scriptCost(t, cost, shared))
}

func scriptCost(t *testing.T, text string, shared bool) func(rows, others int) Time {
	fixed, row, _ := strings.Cut(text, "+")
	one := linear(duration(t, fixed), duration(t, row))
	return func(rows, others int) Time {
		if !shared {
			others = 0
		}
		return one(rows, 0) * Time(1+others)
	}
}

func duration(t *testing.T, text string) Time {
	d, err := time.ParseDuration(text)
	must.Do(t, err)
	return Time(d)
}
