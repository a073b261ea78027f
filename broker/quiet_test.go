// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestALineThatComesAgainAndAgainIsCountedNotWritten(t *testing.T) {
	var out bytes.Buffer
	log := quietLogger(slog.New(slog.NewTextHandler(&out, nil)))
	q := log.Handler().(*quiet)
	say := func(at time.Time, log *slog.Logger, msg string, args ...any) {
		r := slog.NewRecord(at, slog.LevelWarn, msg, 0)
		r.Add(args...)
		_ = log.Handler().Handle(t.Context(), r)
	}
	start := time.Now()
	for i := range 10_000 {
		say(start.Add(time.Duration(i)*time.Microsecond), log, "refused", "uid", 7, "pid", i)
		if i%1000 == 0 {
			say(start, log, "refused", "uid", 8) // of somebody else
			say(start, log.With("model", fmt.Sprint("m", i)), "left")
		}
	}
	text := out.String()
	if n := strings.Count(text, "uid=7"); n != quietLines {
		t.Errorf("%d lines of the one", n)
	}
	if strings.Count(text, "uid=8") != 10 || strings.Count(text, "left") != 10 {
		t.Errorf("others' lines were left out:\n%s", text)
	}
	out.Reset()
	say(start.Add(quietTime+time.Second), log, "refused", "uid", 7)
	if want := fmt.Sprint("left_out_before=", 10_000-quietLines); !strings.Contains(out.String(), want) {
		t.Errorf("%s, want %s", out.String(), want)
	}
	for i := range 10 * quietKeys {
		say(start, log, "refused", "uid", 100+i)
	}
	if n := len(q.state.kinds); n > quietKeys {
		t.Errorf("%d kinds are remembered", n)
	}
	out.Reset()
	all := quietLogger(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))
	for range 100 {
		all.Warn("again")
	}
	if strings.Count(out.String(), "again") != 100 {
		t.Error("lines are left out at level debug")
	}
}
