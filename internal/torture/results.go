// SPDX-License-Identifier: Apache-2.0

package torture

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/internal/chaos"
)

// Done is what a slice came to: a line of the file.
type Done struct {
	Slice   Slice
	Commit  string
	Machine string
	Command string
	Began   time.Time
	Seconds float64
	Result  chaos.Result // Events are those that really took place
}

// readDone reads files of results. One that is not there has none.
func readDone(files ...string) (all []Done, err error) {
	for _, file := range files {
		f, err := os.Open(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in := bufio.NewScanner(f)
		in.Buffer(nil, 16<<20)
		for n := 1; in.Scan(); n++ {
			var d Done
			if err := json.Unmarshal(in.Bytes(), &d); err != nil {
				return nil, fmt.Errorf("%s, line %d: %w", file, n, err)
			}
			all = append(all, d)
		}
		if err := in.Err(); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	return all, nil
}

// appendDone adds a line, whole or not at all.
func appendDone(file string, d *Done) error {
	text, err := json.Marshal(d)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	return errors.Join(err, f.Close())
}

// Commit is what this program was built from: make says so.
var Commit = "unknown"

// machine in a few words.
func machine() string {
	cpu := "CPU"
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			cpu = strings.TrimSpace(strings.TrimLeft(name, "\t :"))
			break
		}
	}
	return fmt.Sprintf("%d cores, %s", runtime.NumCPU(), cpu)
}
