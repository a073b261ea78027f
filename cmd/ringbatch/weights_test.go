// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// The Python tests publish, show and withdraw.
func TestWhatWeightsRefuses(t *testing.T) {
	c := startCLI(t)
	for _, bad := range []struct{ says, args string }{
		{"no model has live weights", "weights"},
		{"nothing was published", "weights m"},
		{"nothing was published", "weights m --withdraw"},
		{"takes one MODEL", "weights --withdraw"},
		{"python -m ringbatch weights load MODEL FILE", "weights load m policy.safetensors"},
	} {
		if out, _ := c.run(strings.Fields(bad.args)...); !strings.Contains(out, bad.says) {
			t.Errorf("ringbatch %s: %s", bad.args, out)
		}
	}
}
