// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/test/testlog"
)

func TestOutputIsLoggedAtItsLevelAndATracebackAsOneRecord(t *testing.T) {
	said := strings.Join([]string{
		"hello", "2026-11-18 09:07:02,454 ERROR ringbatch: a batch failed", "WARNING:root:slow", "time=x level=WARN msg=m",
		"it is still not an ERROR",
		"Traceback (most recent call last):", `  File "m.py", line 6, in run`, "    f()", "ValueError: x", "after it",
		"Traceback (most recent call last):", "  cut",
	}, "\n")
	log := &testlog.Log{}
	p := &process{name: "w-0", s: &Supervisor{log: slog.New(slog.NewTextHandler(log, nil))}}
	last := p.logLines(strings.NewReader(said))
	for _, want := range []string{
		"level=INFO msg=hello worker=w-0",
		`level=ERROR msg="2026-11-18 09:07:02,454 ERROR ringbatch: a batch failed"`, "level=WARN msg=WARNING:root:slow",
		`level=WARN msg="time=x level=WARN msg=m"`,
		`level=ERROR msg="Traceback (most recent call last):\n  File \"m.py\", line 6, in run\n    f()\nValueError: x"`,
		`level=INFO msg="after it"`, `level=ERROR msg="Traceback (most recent call last):\n  cut"`,
	} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, log)
		}
	}
	if !strings.HasPrefix(last, "hello\n") || !strings.HasSuffix(last, "\nafter it") || strings.Contains(last, "Traceback") {
		t.Errorf("last lines: %q", last)
	}
	if last := p.logLines(strings.NewReader(strings.Repeat("x\n", 100) + strings.Repeat("y", 9000))); len(last) > lastBytes {
		t.Errorf("%d bytes of output in a warning", len(last))
	}
}
