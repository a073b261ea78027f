// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// mark is in the environment of every process that tune starts, and of the processes that those start: a worker command may move
// to the background or start a new session.
func mark() string { return fmt.Sprintf("RINGBATCH_TUNE=%d", os.Getpid()) }

// KillAll kills every process that was started, at once.
func KillAll() { endMarked(0) }

const (
	orphanPoll = 5 * time.Millisecond
	killTime   = 10 * time.Second // for killed processes to end; a process that is stuck in the kernel does not
)

// endMarked ends every marked process by SIGTERM, and by SIGKILL after the patience. It returns when they have ended.
func endMarked(patience time.Duration) {
	begin := time.Now()
	asked := map[int]bool{}
	for time.Since(begin) < patience+killTime {
		running := markedProcesses()
		if len(running) == 0 {
			return
		}
		for _, pid := range running {
			if time.Since(begin) >= patience {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			} else if !asked[pid] {
				_ = syscall.Kill(pid, syscall.SIGTERM)
				asked[pid] = true
			}
		}
		time.Sleep(orphanPoll)
	}
}

// markedProcesses lists the processes that still run. (The environment of a zombie is empty.)
func markedProcesses() (running []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/environ")
	want := []byte(mark())
	for _, file := range files {
		environ, _ := os.ReadFile(file)
		for _, variable := range bytes.Split(environ, []byte{0}) {
			if bytes.Equal(variable, want) {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
				running = append(running, pid)
			}
		}
	}
	return running
}
