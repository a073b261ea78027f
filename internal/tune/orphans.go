// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// adoptOrphans has this process be the parent of what its descendants leave behind: a
// worker command that puts itself into the background, or the workers of a broker
// that was killed. Otherwise they would be out of reach, and go on running.
func adoptOrphans() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// KillAll kills every process that was started, at once.
func KillAll() { endDescendants(0) }

const (
	orphanPoll = 5 * time.Millisecond
	killTime   = 10 * time.Second // for the killed to be gone; one that is stuck in the kernel never is
)

// endDescendants ends every process that descends from this one, by SIGTERM, and by
// SIGKILL what still runs after the patience. It returns when they have ended.
func endDescendants(patience time.Duration) {
	begin := time.Now()
	asked := map[int]bool{}
	for time.Since(begin) < patience+killTime {
		running := descendants()
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

// descendants are the processes below this one that have not ended.
func descendants() (running []int) {
	children, ended := map[int][]int{}, map[int]bool{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		text, _ := os.ReadFile(file) // nothing, if it has just ended
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		state, parent := parseStat(string(text))
		children[parent] = append(children[parent], pid)
		ended[pid] = state == "Z" || state == "X"
	}
	for todo := children[os.Getpid()]; len(todo) > 0; {
		pid := todo[0]
		todo = append(todo[1:], children[pid]...)
		if !ended[pid] {
			running = append(running, pid)
		}
	}
	return running
}

// parseStat reads the state and the parent in /proc/PID/stat. The name before them
// may hold anything.
func parseStat(text string) (state string, parent int) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return "", 0
	}
	parent, _ = strconv.Atoi(fields[1])
	return fields[0], parent
}
