// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"sync"
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

// tailBytes is how much of its log a process keeps.
const tailBytes = 64 << 10

// Tail keeps the end of a log, and passes its lines on.
type Tail struct {
	each func(line []byte)
	out  lines

	mu  sync.Mutex
	end []byte
}

func (t *Tail) Write(b []byte) (int, error) {
	if t.each != nil {
		t.out.each = t.each
		_, _ = t.out.Write(b)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = append(t.end, b...)
	if over := len(t.end) - tailBytes; over > 0 {
		t.end = append(t.end[:0], t.end[over:]...)
	}
	return len(b), nil
}

func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.end))
}
