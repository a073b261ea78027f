// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// StartProgram runs `ringbatch ARGS…` at a broker, as users start it. The binary is $RINGBATCH_BINARY, or ringbatch in the
// folder of this program.
func (r *Rig) StartProgram(socket string, args ...string) *testbed.Process {
	binary := os.Getenv("RINGBATCH_BINARY")
	if binary == "" {
		self, err := os.Executable()
		r.Must(err)
		binary = filepath.Join(filepath.Dir(self), "ringbatch")
	}
	p, err := r.Start(testbed.Spec{Command: append([]string{binary}, append(args, "--log-level", "error")...),
		Env: []string{"RINGBATCH_SOCKET=" + socket}})
	r.Must(err)
	return p
}

// Find waits until a program has printed a line with that beginning, and returns the rest of it.
func (r *Rig) Find(p *testbed.Process, prefix string) (found string) {
	r.Must(testbed.Eventually(20*time.Second, func() error {
		for line := range strings.SplitSeq(p.Log(), "\n") {
			if rest, ok := strings.CutPrefix(line, prefix); ok {
				found = strings.TrimSpace(rest)
				return nil
			}
		}
		return fmt.Errorf("%s printed no line %q: %s", p, prefix, p.Log())
	}))
	return found
}
