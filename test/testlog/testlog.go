// SPDX-License-Identifier: Apache-2.0

// Package testlog keeps a log for tests. It is separate from testbed, which imports the
// broker, because tests inside the broker use it too.
package testlog

import (
	"bytes"
	"strings"
	"sync"
)

// Log may be read while it is written.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Has reports whether the text was written.
func (l *Log) Has(text string) bool { return strings.Contains(l.String(), text) }
