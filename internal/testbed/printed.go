// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"fmt"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/testlog"
)

// Printed is what a process has printed so far.
type Printed struct{ testlog.Log }

// Find waits for a line that begins like that and gives its rest.
func (l *Printed) Find(prefix string, patience time.Duration) (string, error) {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		for _, line := range strings.SplitAfter(l.String(), "\n") {
			if rest, ok := strings.CutPrefix(line, prefix); ok && strings.HasSuffix(rest, "\n") {
				return strings.TrimSpace(rest), nil
			}
		}
	}
	return "", fmt.Errorf("no line %q in %v", prefix, patience)
}
