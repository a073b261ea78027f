// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"

	"github.com/ringbatch/ringbatch/internal/progress"
)

// lines calls each for every line that is written.
type lines struct {
	part []byte // of a line that has not ended
	each func([]byte)
}

func (l *lines) Write(b []byte) (int, error) {
	n := len(b)
	for {
		line, rest, ended := bytes.Cut(b, []byte{'\n'})
		l.part = append(l.part, line...)
		if !ended {
			return n, nil
		}
		l.each(l.part)
		l.part, b = l.part[:0], rest
	}
}

// logTail keeps the end of a log, and passes its lines on.
type logTail struct {
	progress.Tail
	each func(line []byte)
	out  lines
}

func (t *logTail) Write(b []byte) (int, error) {
	if t.each != nil {
		t.out.each = t.each
		_, _ = t.out.Write(b)
	}
	return t.Tail.Write(b)
}
