// SPDX-License-Identifier: Apache-2.0

package top

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/ringbatch/ringbatch/admin/stats"
)

func model(name string, rate float64, workers int) stats.Model {
	m := stats.Model{Name: name, Slots: 100, SlotsQueued: 20, SlotsRunning: 5, ReadyWorkers: workers, NotReady: "no worker attached"}
	m.Windows = []stats.Window{{Seconds: windowSeconds, RequestsPerS: rate}}
	for i := range workers {
		m.Workers = append(m.Workers, stats.Worker{ID: i, Name: name + "-w", State: "idle"})
	}
	return m
}

// screen draws the view and checks that the lines fit and are printable.
func screen(t *testing.T, v *view, width, height int) string {
	t.Helper()
	lines := v.draw(width, height)
	if len(lines) != height {
		t.Errorf("%d lines on a screen of %d", len(lines), height)
	}
	for i, l := range lines {
		if n := utf8.RuneCountInString(l); n > width {
			t.Errorf("%d×%d: line %d has %d columns: %q", width, height, i, n, l)
		}
		if strings.ContainsFunc(l, func(r rune) bool { return !unicode.IsPrint(r) }) {
			t.Errorf("line %d has characters that do not print: %q", i, l)
		}
	}
	return strings.Join(lines, "\n")
}

func TestModelsAreSortedByTheChosenColumn(t *testing.T) {
	v := &view{}
	v.take(answer{stats: &stats.Broker{Pid: 1, Models: []stats.Model{model("b", 5, 1), model("a", 1, 0), model("c", 3, 1)}}}, time.Now())
	for sort, want := range []string{"abc", "bca"} {
		v.sort = sort
		var got string
		for _, line := range v.modelTable()[1:] {
			got += line[:1]
		}
		if got != want {
			t.Errorf("by %s: %s, want %s", columns[sort].title, got, want)
		}
	}
	if text := screen(t, v, 160, 20); !strings.Contains(text, "req/s*") || !strings.Contains(text, "not ready: no worker attached") {
		t.Error(text)
	}
	v.now.Weights = []stats.Weights{{Model: "b", Version: 7, AgeS: 0.25}}
	if text := screen(t, v, 160, 20); strings.Count(text, "weights: version 7, 0.2 s old") != 1 {
		t.Error(text)
	}
}

func TestAScreenOfAnySizeIsFilledAndNoTextOfAPeerLeavesItsLine(t *testing.T) {
	m := model("evil\x1b[2J\nname", 1, 3)
	v := &view{socket: "/run/b.sock"}
	v.take(answer{stats: &stats.Broker{Models: []stats.Model{m}}}, time.Now())
	for _, size := range [][2]int{{1, 1}, {10, 3}, {40, 5}, {300, 50}} {
		screen(t, v, size[0], size[1])
	}
}

func TestTheLastAnswerStaysWhileTheBrokerIsAway(t *testing.T) {
	v := &view{}
	v.take(answer{err: errors.New("no broker")}, time.Now())
	if text := screen(t, v, 80, 10); !strings.Contains(text, "no answer from the broker; trying again: no broker") {
		t.Error(text)
	}
	v.take(answer{stats: &stats.Broker{Models: []stats.Model{model("m", 1, 1)}}}, time.Now())
	v.take(answer{err: errors.New("gone")}, time.Now())
	if text := screen(t, v, 80, 10); !strings.Contains(text, "no answer since ") || !strings.Contains(text, "m-w #0") {
		t.Error(text)
	}
}
