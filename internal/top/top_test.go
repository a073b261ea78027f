// SPDX-License-Identifier: Apache-2.0

package top

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/ringbatch/ringbatch/stats"
)

func TestKeysComeOutOfBytesHoweverTheyArrive(t *testing.T) {
	var k keyboard
	var got []key
	for _, b := range []byte("j\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[1;5C\x1b\x1b[D\x1b[99~\x1b[Zk\xc3\xa9\x03") {
		if key := k.press(b); key != keyNone {
			got = append(got, key)
		}
	}
	want := []key{'j', keyUp, keyDown, keyPageUp, keyPageDown, keyRight, keyLeft, 'k', ctrlC}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func model(name string, rate, p99 float64, workers int) stats.Model {
	m := stats.Model{Name: name, Signature: "x:f32[4] -> y:f32[4]", Slots: 100, SlotsQueued: 20, SlotsRunning: 5, MaxBatchSize: 8, ReadyWorkers: workers, NotReady: "no worker attached", Ended: map[string]uint64{"OK": 7, "Expired": 2}}
	for _, s := range windows {
		m.Windows = append(m.Windows, stats.Window{Seconds: s, RequestsPerS: rate + float64(s), Latency: stats.WindowLatency{P99: p99}})
	}
	for i := range workers {
		m.Workers = append(m.Workers, stats.Worker{ID: i, Name: name + "-w", State: "idle", SinceS: 10})
	}
	return m
}

func broker(models ...stats.Model) *stats.Broker { return &stats.Broker{Pid: 1, Models: models} }

var sequences = regexp.MustCompile("\x1b\\[[0-9;]*m")

// seen is what a screen shows, checked: no line is wider than it or holds
// anything but printable characters.
func seen(t *testing.T, v *view, width, height int) string {
	t.Helper()
	lines := v.draw(width, height)
	if len(lines) != height {
		t.Errorf("%d lines on a screen of %d", len(lines), height)
	}
	for i, l := range lines {
		l = sequences.ReplaceAllString(l, "")
		if columns(l) > width {
			t.Errorf("%d×%d: line %d has %d columns: %q", width, height, i, columns(l), l)
		}
		for _, r := range l {
			if !unicode.IsPrint(r) {
				t.Errorf("line %d has %q: %q", i, r, l)
			}
		}
		lines[i] = l
	}
	return strings.Join(lines, "\n")
}

func TestTheChosenModelIsFollowedHoweverTheListIsSorted(t *testing.T) {
	v := newView("b.sock", "")
	v.take(snapshot{at: time.Now(), stats: broker(model("a", 10, 3, 1), model("b", 30, 1, 0), model("c", 20, 2, 1))})
	order := func() (names string) {
		for _, m := range v.models() {
			names += m.Name
		}
		return names
	}
	for _, step := range []struct {
		press         []key
		order, chosen string
	}{
		{nil, "abc", "a"},
		{[]key{'j'}, "abc", "b"},
		{[]key{'s'}, "bca", "b"}, // by requests/s
		{[]key{keyDown, 'j', 'j'}, "bca", "a"},
		{[]key{'r'}, "acb", "a"},
		{[]key{'s', 's'}, "acb", "a"}, // by p99
		{[]key{'G', 'k'}, "acb", "c"},
		{[]key{'?', 'j'}, "acb", "c"}, // that key only ended the help
		{[]key{'S', keyLeft, keyLeft, 'g'}, "abc", "a"},
	} {
		for _, k := range step.press {
			v.press(k)
		}
		if order() != step.order || v.chosen != step.chosen {
			t.Fatalf("after %v: %s with %s chosen, want %s, %s", step.press, order(), v.chosen, step.order, step.chosen)
		}
	}
	v.press('j')
	v.take(snapshot{at: time.Now(), stats: broker(model("a", 0, 0, 0), model("c", 0, 0, 0))})
	if v.chosen != "c" {
		t.Errorf("b went; %s is chosen, not the one in its place", v.chosen)
	}
	v.take(snapshot{at: time.Now(), stats: broker()})
	if text := seen(t, v, 80, 10); !strings.Contains(text, "no models yet") {
		t.Error(text)
	}
}

func TestWhatPeersSayIsShownAsPrintableTextOnScreensOfEverySize(t *testing.T) {
	const hostile = "\x1b[2J\x1b]0;owned\x07\n\u202e日本語e\u0301" + "\xff\u009b5n"
	m := model(hostile, 1e9, 1e9, 3)
	m.Signature, m.NotReady = hostile, hostile
	m.Ended[hostile] = 1 << 60
	for i := range m.Workers {
		m.Workers[i].Name, m.Workers[i].GPU, m.Workers[i].State = hostile, hostile, hostile
	}
	m.Learned.Costs = []stats.LearnedCost{{Rows: 1, MS: 1}, {Rows: 32, MS: 2}}
	models := []stats.Model{m}
	for i := range 30 {
		models = append(models, model(fmt.Sprint("model-", i, strings.Repeat("x", i*5)), 1, 1, i%3))
	}
	s := broker(models...)
	s.MPS = hostile
	s.Aliases = []stats.Alias{{Name: hostile, To: []stats.AliasTarget{{Model: hostile, SharePercent: 10}}}}
	s.Processes = []stats.Process{{Name: hostile, Model: hostile, State: hostile, LastEnd: hostile, Spare: true}}
	v := newView(hostile, "")
	v.take(snapshot{at: time.Now(), stats: s, model: hostile, batches: &stats.Batches{NowUS: 5e6, Batches: []stats.Batch{{Worker: 0, Rows: 1 << 30, StartedUS: -1 << 50, FinishedUS: 1 << 50}, {Worker: 1, StartedUS: 9, FinishedUS: 3}}}})
	for _, how := range []func(){func() {}, func() { v.take(snapshot{err: errors.New(hostile)}) }, func() { v.press('?') }} {
		how()
		for _, width := range []int{1, 2, 9, 20, 33, 50, 80, 130, 300} {
			for _, height := range []int{1, 2, 3, 4, 7, 24, 60} {
				v.down = height
				seen(t, v, width, height)
			}
		}
	}
}

func TestALaneShowsEachBatchAsLongAsItTookAndDarkerWithMoreRows(t *testing.T) {
	v := newView("", "")
	m := model("m", 1, 1, 2)
	v.take(snapshot{at: time.Now(), stats: broker(m), model: "m", batches: &stats.Batches{NowUS: 12e6, Batches: []stats.Batch{
		{Worker: 0, Rows: 8, StartedUS: 10.2e6, FinishedUS: 10.6e6},
		{Worker: 0, Rows: 1, StartedUS: 10.8e6, FinishedUS: 11e6},
		{Worker: 0, Rows: 8, StartedUS: 11.42e6, FinishedUS: 11.44e6},
		{Worker: 1, Rows: 4, StartedUS: 9.9e6, FinishedUS: 12.5e6},
	}}})
	for worker, want := range []string{" ██ ░  ·  ", "▒▒▒▒▒▒▒▒▒▒"} {
		if got := v.lane(worker, 8, 10); got != want {
			t.Errorf("worker %d: %q, want %q", worker, got, want)
		}
	}
	// More batches than the broker remembers: only what is known is drawn.
	v.take(snapshot{at: time.Now(), stats: broker(m), model: "m", missed: true, batches: &stats.Batches{NowUS: 13e6, Batches: []stats.Batch{{Worker: 0, Rows: 8, StartedUS: 12.9e6, FinishedUS: 12.95e6}}}})
	if got := v.lane(0, 8, 10); got != "█████     " {
		t.Errorf("after a gap: %q", got)
	}
}

func TestAWorkersBusyShareAndBatchTimeAreThoseSinceTheLastLook(t *testing.T) {
	v := newView("", "")
	at := time.Now()
	look := func(after time.Duration, batches uint64, busy float64) workerRate {
		m := model("m", 1, 1, 1)
		m.Workers[0].Batches, m.Workers[0].BusyS = batches, busy
		at = at.Add(after)
		v.take(snapshot{at: at, stats: broker(m)})
		return v.rates[workerKey{"m", 0}]
	}
	if r := look(0, 100, 5); r.busy != 0.5 || r.batchMS != 50 { // in the 10 s since it attached
		t.Errorf("at first: %+v", r)
	}
	if r := look(2*time.Second, 110, 6.5); r.busy != 0.75 || r.batchMS != 150 {
		t.Errorf("then: %+v", r)
	}
	if r := look(time.Second, 110, 6.5); r.busy != 0 || r.batches != 0 {
		t.Errorf("idle: %+v", r)
	}
}

func TestAModelIsShownWithTheNamesThatStandForIt(t *testing.T) {
	s := broker(model("m-2", 1, 1, 1))
	s.Aliases = []stats.Alias{{Name: "m", To: []stats.AliasTarget{{Model: "m-1", SharePercent: 90}, {Model: "m-2", SharePercent: 10, Clients: 1}}}}
	v := newView("", "")
	v.take(snapshot{at: time.Now(), stats: s})
	if text := seen(t, v, 80, 20); !strings.Contains(text, "also called m (10 %, 1 client)\n") {
		t.Error(text)
	}
}
