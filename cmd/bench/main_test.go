// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// TestMain lets the test binary be a process of the suites, as the benchmark itself is.
func TestMain(m *testing.M) {
	testbed.Play(roles())
	os.Exit(m.Run())
}

// It asserts the figures that came out, never how fast.
func TestTheTransportSuiteRuns(t *testing.T) {
	var out strings.Builder
	must.Do(t, suites["transport"](t.Context(), strings.Fields("--only=latency,small,large --rounds=1 --round=100ms"), &out))
	for _, want := range []string{"latency_ratio", "small_ratio", "large_ratio"} {
		if !strings.Contains(out.String(), "\n"+want+" ") {
			t.Errorf("no %s in:\n%s", want, &out)
		}
	}
}
