// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/must"
)

func TestWeightsAreLoadedListedAndWithdrawn(t *testing.T) {
	c := startCLI(t)
	const file = "../../internal/safetensors/testdata/bf16.safetensors"
	version := func() uint32 {
		t.Helper()
		var list []stats.Weights
		must.Do(t, json.Unmarshal([]byte(c.must("weights", "m", "--json")), &list))
		return list[0].Version
	}
	for _, bad := range []struct{ says, args string }{
		{"no model has live weights", "weights"},
		{"nothing was published", "weights m"},
		{"nothing was published", "weights m --withdraw"},
		{"take a MODEL", "weights --load " + file},
		{"no such file", "weights m --load absent.safetensors"},
		{"safetensors", "weights m --load cli_test.go"},
	} {
		if out, _ := c.run(strings.Fields(bad.args)...); !strings.Contains(out, bad.says) {
			t.Errorf("ringbatch %s: %s", bad.args, out)
		}
	}
	c.must("weights", "m", "--load", file)
	c.must("weights", "m", "--load", file)
	if v := version(); v != 2 {
		t.Errorf("version %d, not 2", v)
	}
	c.must("weights", "m", "--withdraw")
	if out := c.must("weights"); version() != 1 || !strings.Contains(out, "version 2 of m is withdrawn") {
		t.Errorf("version %d\n%s", version(), out)
	}
	if out, code := c.run("weights", "m", "--withdraw"); code == 0 {
		t.Error("withdrawn twice:", out)
	}
	c.must("weights", "m", "--load", file)
	if v := version(); v != 3 {
		t.Errorf("version %d, not 3", v)
	}
}
