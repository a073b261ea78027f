// SPDX-License-Identifier: Apache-2.0

package logging

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker/supervise"
	"github.com/ringbatch/ringbatch/internal/must"
)

// stuck is a reader that does not read until read is closed.
type stuck struct {
	entered, read chan struct{}
	text          strings.Builder
}

func (s *stuck) Write(b []byte) (int, error) {
	select {
	case s.entered <- struct{}{}:
	case <-s.read:
	}
	<-s.read
	return s.text.Write(b)
}

func TestALogWithoutAReaderLosesLinesAndCountsThem(t *testing.T) {
	r := &stuck{entered: make(chan struct{}), read: make(chan struct{})}
	l := newWriter(r, 2, func(n int64) string { return fmt.Sprintf("lost=%d\n", n) })
	line := func(i int) {
		if n, err := fmt.Fprintf(l, "line %d\n", i); n != len("line 0\n") || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
	line(0)
	<-r.entered
	for i := 1; i < 10; i++ { // two have room
		line(i)
	}
	close(r.read)
	l.End()
	if text := r.text.String(); !strings.HasPrefix(text, "line 0\nline 1\nline 2\n") || !strings.HasSuffix(text, "lost=7\n") {
		t.Errorf("the log is\n%s", text)
	}
}

func TestAWarningOnATerminalHasTheOutputThatItsLogLeavesOut(t *testing.T) {
	for level, want := range map[slog.Level]string{
		slog.LevelInfo: "WARN it ended worker=w in=1s\n",
		slog.LevelWarn: "WARN it ended worker=w in=1s\n   | why\n   | \\x1b[31m\n",
	} {
		var text strings.Builder
		log := slog.New(&Terminal{w: &text, level: level})
		log.Warn("it ended", "worker", "w", "in", time.Second, "gpu", "", "id", 7, "output", supervise.Said("why\n\x1b[31m"))
		if got := text.String()[len("15:04:05 "):]; got != want {
			t.Errorf("%v: %q, want %q", level, got, want)
		}
	}
}

func TestALogInJSONIsOneObjectALine(t *testing.T) {
	var text strings.Builder
	f, err := NewFormat("info", "json")
	must.Do(t, err)
	log, w := f.Open(&text)
	log.Info("two\nlines", "model", "m", "wait", time.Second)
	log.Debug("not asked for")
	w.lost.Add(3)
	log.Warn("then")
	w.End()
	lines := strings.Split(strings.TrimSuffix(text.String(), "\n"), "\n")
	for _, line := range lines {
		var v map[string]any
		if err := json.Unmarshal([]byte(line), &v); err != nil || v["msg"] == "" || v["time"] == "" || v["level"] == "" {
			t.Errorf("%q: %v", line, err)
		}
	}
	if len(lines) != 3 {
		t.Errorf("%d lines:\n%s", len(lines), &text)
	}
	if _, err := NewFormat("info", "xml"); err == nil {
		t.Error("a format that there is not was taken")
	}
}
