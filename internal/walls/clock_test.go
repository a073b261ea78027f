// SPDX-License-Identifier: Apache-2.0

package walls

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
)

// wallClock matches every way to read the wall clock, by the ending of the file's name.
var wallClock = map[string]*regexp.Regexp{
	".go": regexp.MustCompile(`\.Round\(0\)|\.Unix(Nano|Micro|Milli)?\(\)|CLOCK_REALTIME`),
	".c":  regexp.MustCompile(`CLOCK_REALTIME|gettimeofday|\btime\((NULL|0)\)|_timedwait`),
	".py": regexp.MustCompile(`\btime\.time(_ns)?\(|datetime\.`),
}

// allowed are the lines that need the wall clock: a number that no earlier broker had, the times
// that traces and pages show, the age of a file.
var allowed = regexp.MustCompile(`epoch:|\bwall :?= |glob\("whole-`)

// Jumps of the wall clock move no deadline, since broker, clients and workers never read it.
func TestNothingIsTimedByTheWallClock(t *testing.T) {
	for _, dir := range []string{"broker", "client", "worker", "shm", "internal/attach", "internal/control", "cbindings/src",
		"python/ringbatch"} {
		files := 0
		must.Do(t, filepath.WalkDir(filepath.Join("../..", dir), func(path string, _ fs.DirEntry, err error) error {
			reads := wallClock[filepath.Ext(path)]
			if err != nil || reads == nil || strings.HasSuffix(path, "_test.go") {
				return err
			}
			files++
			text, err := os.ReadFile(path)
			for i, line := range strings.Split(string(text), "\n") {
				if reads.MatchString(line) && !allowed.MatchString(line) {
					t.Errorf("%s:%d reads the wall clock: %s", path, i+1, strings.TrimSpace(line))
				}
			}
			return err
		}))
		if files == 0 {
			t.Errorf("%s has no sources", dir)
		}
	}
}
