// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

func TestATraceHasEveryRequestAndItsParts(t *testing.T) {
	c := startCLI(t)
	c.affineWorker()
	l := c.load(4)
	file := c.bed.Path("trace.json")
	out, code := c.run("trace", "affine", "--seconds", "0.3", "--out", file, "--slowest", "3")
	l.end()
	if code != 0 || !strings.Contains(out, "handover") {
		t.Fatalf("trace: %d\n%s", code, out)
	}
	var trace struct {
		TraceEvents []struct {
			Name, Ph string
			Ts, Dur  float64
			Id       string
			Args     map[string]any
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &trace); err != nil {
		t.Fatal(err)
	}
	requests, batched, open := 0, 0, map[string]int{}
	for _, e := range trace.TraceEvents {
		switch e.Ph {
		case "b":
			open[e.Id]++
			if strings.HasPrefix(e.Name, "request of") {
				requests++
			}
		case "e":
			open[e.Id]--
		case "X":
			batched += int(e.Args["requests"].(float64))
			if e.Dur < 0 || e.Ts < -1e6 {
				t.Errorf("a batch at %v of %v µs", e.Ts, e.Dur)
			}
		}
	}
	for id, n := range open {
		if n != 0 {
			t.Errorf("request %s: %d spans do not end", id, n)
		}
	}
	if requests < 10 || batched != requests {
		t.Errorf("%d requests, %d in batches", requests, batched)
	}
	if out, code := c.run("trace", "affine", "--seconds", "61"); code != 2 {
		t.Errorf("61 s: %d\n%s", code, out)
	}
	if out, code := c.run("trace", "nobody", "--seconds", "0.01"); code != 1 || !strings.Contains(out, "no such model") {
		t.Errorf("an unknown model: %d\n%s", code, out)
	}
}
