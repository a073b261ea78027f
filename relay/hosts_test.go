// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/testlog"
)

func TestAHostsWindowFollowsWhatItReports(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name                 string
		queue, compute, took time.Duration
		fill                 float64
		grows, shrinks       bool
	}{
		{"it has nothing to do", ms, 10 * ms, 12 * ms, 0.1, true, false},
		{"one batch waits behind another", 10 * ms, 10 * ms, 21 * ms, 1, false, false},
		{"many wait", 30 * ms, 10 * ms, 41 * ms, 1, false, true},
		{"it waits, but not as long as the way takes", ms, ms / 10, 10 * ms, 1, false, false},
		{"its worker wakes up for full batches", ms / 10, ms / 100, ms, 1, true, false},
		{"its worker wakes up for batches that could be fuller", ms / 10, ms / 100, ms, 0.7, false, false},
		{"its worker wakes up for small batches", ms / 10, ms / 100, ms, 0.4, false, true},
	} {
		h := newHosts(slog.New(slog.DiscardHandler), LeastRequest, 32).add("h")
		h.window, h.inFlight = 4, 4
		for range 10 {
			h.answered(oip.Load{Queue: c.queue, Compute: c.compute}, true, c.took, c.fill)
		}
		if (h.window > 4) != c.grows || (h.window < 4) != c.shrinks {
			t.Errorf("%s: the window went from 4 to %.1f", c.name, h.window)
		}
	}
}

// usableHosts are hosts that can be chosen, by name.
func usableHosts(route Route, names ...string) (*hosts, map[string]*host) {
	p := newHosts(slog.New(slog.DiscardHandler), route, 32)
	byName := map[string]*host{}
	for _, name := range names {
		h := p.add(name)
		h.usable = true
		byName[name] = h
	}
	return p, byName
}

func TestWhyAHostIsLeftIsSaidOnce(t *testing.T) {
	log := &testlog.Log{}
	h := newHosts(slog.New(slog.NewTextHandler(log, nil)), LeastRequest, 8).add("h")
	for i, c := range []struct {
		err  string
		says int // lines so far
	}{
		{"dial tcp 127.0.0.1:1: connect: connection refused", 1},
		{"dial tcp 127.0.0.1:1: connect: connection refused", 1},
		{"error reading server preface: remote error: tls: certificate required", 2},
		{"write tcp 127.0.0.1:40001->127.0.0.1:1: write: broken pipe", 2}, // seen in turns with the line before
		{"error reading server preface: remote error: tls: certificate required", 2},
		{"error reading server preface: raw-read tcp 127.0.0.1:40002->127.0.0.1:1: use of closed network connection", 3},
		{"error reading server preface: raw-read tcp 127.0.0.1:40003->127.0.0.1:1: use of closed network connection", 3},
		{"error reading server preface: http2: frame too large", 4},
	} {
		h.disconnected(errors.New(c.err))
		if n := strings.Count(log.String(), "host left"); n != c.says {
			t.Errorf("%d: %s: said %d times, want %d", i, c.err, n, c.says)
		}
	}
}

func TestWeightedSendsByWhatHostsReportThatTheyCanDo(t *testing.T) {
	p, all := usableHosts(Weighted, "a", "b", "c")
	report := func(name string, perSecond, utilization float64) { // as it travels
		load, ok := oip.ParseLoad((&oip.Load{PerSecond: perSecond, Utilization: utilization, Compute: time.Millisecond}).Append(nil))
		all[name].answered(load, ok, time.Millisecond, 1)
	}
	report("a", 300, 0.5) // could do 600
	report("b", 200, 1)   // 200
	got := map[string]int{}
	send := func(n int) {
		clear(got)
		for range n {
			c := p.choose(nil, nil)
			got[c.host.name]++
			c.end()
		}
	}
	send(1200) // c has not reported: it counts as the mean of the others, 400
	for name, want := range map[string]int{"a": 600, "b": 200, "c": 400} {
		if n := got[name]; n < want-2 || n > want+2 {
			t.Errorf("%s got %d of 1200, want %d", name, n, want)
		}
	}
	report("a", 300, 1.5) // it has become slower than b
	report("c", 200, 1)
	send(600)
	for _, name := range []string{"a", "b", "c"} {
		if n := got[name]; n < 198 || n > 202 {
			t.Errorf("%s got %d of 600 although all are alike", name, n)
		}
	}
}

func TestFillUsesAHostOnlyWhenThoseBeforeItAreFull(t *testing.T) {
	p, all := usableHosts(Fill, "b", "a", "c")
	all["a"].window, all["b"].window = 2, 1
	var order []string
	var calls []*call
	for range 4 {
		c := p.choose(nil, nil)
		order, calls = append(order, c.host.name), append(calls, c)
	}
	if got := strings.Join(order, " "); got != "a a b c" {
		t.Errorf("four batches went to %s, want a a b c", got)
	}
	calls[0].end()
	if c := p.choose(nil, nil); c.host.name != "a" {
		t.Errorf("a has room again, the next went to %s", c.host.name)
	}
	if c := p.choose([]*host{all["a"]}, nil); c.host.name == "a" {
		t.Error("a batch went back to the host that it comes from")
	}
}

func TestABatchGoesOnAtOnceOnlyToAHostThatItWasNotAt(t *testing.T) {
	p, all := usableHosts(LeastRequest, "a", "b", "c")
	all["c"].usable = false
	if been := []*host{all["a"]}; !p.others(been) {
		t.Error("b is left")
	}
	if been := []*host{all["a"], all["b"]}; p.others(been) {
		t.Error("only c is left, which cannot be used")
	}
}

func TestWhatAHostRefusedForItsSizeIsForgotten(t *testing.T) {
	h := newHosts(slog.New(slog.DiscardHandler), LeastRequest, 8).add("h")
	h.tooLarge(1000, "")
	if n := h.mostBytes(h.learned.Add(sizeMemory - 1)); n != 500 {
		t.Errorf("it gets %d bytes, want half of what it refused", n)
	}
	if n := h.mostBytes(h.learned.Add(sizeMemory)); n != 0 {
		t.Errorf("it still gets no more than %d bytes", n)
	}
}
