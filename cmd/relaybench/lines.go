package main

import (
	"bytes"
	"fmt"
	"strings"
	"sync"
	"time"
)

// lines is what a process has printed so far.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// find waits for a line that begins like that and gives its rest.
func (l *lines) find(prefix string, patience time.Duration) (string, error) {
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
