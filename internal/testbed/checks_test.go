// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"os"
	"path/filepath"
	"testing"
)

// hack/results.py makes tables of it.
func TestChecksAreWrittenAsTheTablesReadThem(t *testing.T) {
	var c Checks
	c.Report("rate", "2 against 1", 2, 1.5, false)
	c.Report("wait", "2 against 1", 2, 1.5, true)
	file := filepath.Join(t.TempDir(), "checks.json")
	if err := c.Write(file, "relay"); err != nil {
		t.Fatal(err)
	}
	const want = `{
 "relay": {
  "checks": [
   {
    "name": "rate",
    "measured": 2,
    "must": "≥ 1.5",
    "ok": true,
    "behind": "2 against 1"
   },
   {
    "name": "wait",
    "measured": 2,
    "must": "≤ 1.5",
    "ok": false,
    "behind": "2 against 1"
   }
  ]
 },
 "suite": "relay"
}
`
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
}
