// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Printed is what a process has printed so far.
type Printed struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Printed) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// Find waits for a line that begins like that and gives its rest.
func (l *Printed) Find(prefix string, patience time.Duration) (string, error) {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		l.mu.Lock()
		text := l.text.String()
		l.mu.Unlock()
		for _, line := range strings.SplitAfter(text, "\n") {
			if rest, ok := strings.CutPrefix(line, prefix); ok && strings.HasSuffix(rest, "\n") {
				return strings.TrimSpace(rest), nil
			}
		}
	}
	return "", fmt.Errorf("no line %q in %v", prefix, patience)
}
