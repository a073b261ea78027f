// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestATableKeepsTheRowsOfPartsThatWereNotRunAgainAndItsNotes(t *testing.T) {
	dir := t.TempDir()
	results, path := filepath.Join(dir, "done.jsonl"), filepath.Join(dir, "table.md")
	const kept = "| stops: as it was |\n"
	if err := os.WriteFile(path, []byte("| clients: an old row |\n"+kept+notes+"\nby hand\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		d := done{Slice: Slice{Part: "clients", Index: i, Seed: uint64(i + 1), Events: 5000}, Commit: "c", Machine: "m",
			Result: Result{Events: 5000, Passed: 5001}}
		if err := appendDone(results, &d); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // written again, it stays as it is
		if err := writeTable(path, results); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"| 10,000 | 2 slices from 1 on | 10,002 | 0 |", kept, "| not run |",
			"\nbin/chaos --only clients --events 5000 --seed 1\n", notes + "\nby hand\n"} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%q is missing in\n%s", want, text)
			}
		}
		if strings.Contains(string(text), "an old row") {
			t.Errorf("a row of a part that was run again stayed:\n%s", text)
		}
	}
}
