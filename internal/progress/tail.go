// SPDX-License-Identifier: Apache-2.0

package progress

import (
	"bytes"
	"sync"
)

// tailBytes is the most that a Tail keeps.
const tailBytes = 64 << 10

// Tail is a writer that keeps the end of a process's output. The zero value is ready.
type Tail struct {
	mu  sync.Mutex
	end []byte
}

func (t *Tail) Write(b []byte) (int, error) {
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
