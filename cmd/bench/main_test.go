// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// TestMain lets the test binary be a process of the suites, as the benchmark itself is.
func TestMain(m *testing.M) {
	testbed.Play(roles())
	os.Exit(m.Run())
}

// Each suite runs over real processes, shortly. It asserts the figures that came out, never how fast.
func TestEverySuiteRuns(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "ringbatch")
	if out, err := exec.Command("go", "build", "-o", binary, "../ringbatch").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Setenv("RINGBATCH_BINARY", binary)
	for _, c := range []struct{ suite, flags, figures string }{
		{"transport", "--only=latency,small,large,in_flight --requests=30000", "latency_ratio small_ratio large_ratio in_flight"},
		{"gateway", "--only=http_small,grpc_large", "http_small http_small_one http_small_p99 grpc_large"},
		{"relay", "--only=one,hosts", "one two four"},
		{"pipeline", "", "throughput_8 latency_8 throughput_1 latency_1"},
	} {
		var out strings.Builder
		if err := suites[c.suite](t.Context(), append(strings.Fields(c.flags), "--rounds=1", "--round=100ms"), &out); err != nil {
			t.Errorf("%s: %v", c.suite, err)
		}
		for _, want := range strings.Fields(c.figures) {
			if !strings.Contains(out.String(), "\n"+want+" ") {
				t.Errorf("%s: no %s in:\n%s", c.suite, want, &out)
			}
		}
	}
}
