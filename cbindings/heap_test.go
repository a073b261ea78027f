// SPDX-License-Identifier: Apache-2.0

package cbindings

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Client, broker and worker are threads of one process here, so the thread
// sanitizer sees all that happens in the memory which they share. It must stay
// silent, and speak where a SYNC POINT is weakened: otherwise its silence means
// nothing.
func TestTheThreadSanitizerSeesNoRaceInSharedMemory(t *testing.T) {
	t.Parallel()
	for _, mutant := range []struct{ name, file, from, to string }{
		{name: "as it is"},
		{"completion without acquire", "shm.h", "(&b->words[slot], memory_order_acquire)", "(&b->words[slot], memory_order_relaxed)"},
		{"entry without release", "shm.c", "atomic_exchange(&p->words->tail, p->tail + 1)", "atomic_store_explicit(&p->words->tail, p->tail + 1, memory_order_relaxed)"},
	} {
		t.Run(mutant.name, func(t *testing.T) {
			t.Parallel()
			exe := heapProgram(t, mutant.file, mutant.from, mutant.to)
			if mutant.file == "" {
				execute(t, []string{"TSAN_OPTIONS=halt_on_error=1"}, exe, "1000")
				return
			}
			cmd := exec.Command(exe, "1000")
			cmd.Env = append(os.Environ(), "TSAN_OPTIONS=halt_on_error=1")
			if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "data race") {
				t.Errorf("the sanitizer did not see it: %v\n%s", err, out)
			}
		})
	}
}

// heapProgram builds testdata/heap.c with the library's sources, in one of
// which a text is another one.
func heapProgram(t *testing.T, file, from, to string) string {
	t.Helper()
	copied := t.TempDir()
	if err := os.CopyFS(filepath.Join(copied, "cbindings"), os.DirFS(".")); err != nil {
		t.Fatal(err)
	}
	src := filepath.Join(copied, "cbindings", "src")
	if file != "" {
		path := filepath.Join(src, file)
		text, err := os.ReadFile(path)
		if err != nil || strings.Count(string(text), from) != 1 {
			t.Fatalf("%s: %q stands there %d times, want once (%v)", path, from, strings.Count(string(text), from), err)
		}
		if err := os.WriteFile(path, []byte(strings.Replace(string(text), from, to, 1)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	library, err := filepath.Glob(filepath.Join(src, "*.c"))
	if err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(copied, "heap")
	run(t, "cc", append([]string{"-std=gnu11", "-D_GNU_SOURCE", "-g", "-O0", "-fsanitize=thread", "-pthread", "-o", exe, filepath.Join(copied, "cbindings", "testdata", "heap.c")}, library...)...)
	return exe
}
