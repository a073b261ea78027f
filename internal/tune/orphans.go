// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
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

// endDescendants ends every process that was started below this one, by SIGTERM, and by
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

// process is one for good: its number may be another's later.
type process struct {
	pid   int
	began string // in ticks since the machine started
}

// inherited are processes that are below this one and not ours: those of a shell that
// became this program, as the tee of `exec ringbatch tune … > >(tee log)`.
var inherited struct {
	sync.Mutex
	known map[process]bool
}

// spareInherited has what is below this process now, and what that starts, go on running.
func spareInherited() {
	running := descendants()
	inherited.Lock()
	defer inherited.Unlock()
	if inherited.known == nil {
		inherited.known = map[process]bool{}
	}
	for _, pid := range running {
		if _, _, began := readStat(pid); began != "" {
			inherited.known[process{pid, began}] = true
		}
	}
}

// descendants are the processes below this one that have not ended, without those that
// are inherited.
func descendants() (running []int) {
	inherited.Lock()
	defer inherited.Unlock()
	children, ended, began := map[int][]int{}, map[int]bool{}, map[int]string{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		state, parent, start := readStat(pid)
		children[parent] = append(children[parent], pid)
		ended[pid] = state == "" || state == "Z" || state == "X"
		began[pid] = start
	}
	for todo := children[os.Getpid()]; len(todo) > 0; {
		pid := todo[0]
		todo = append(todo[1:], children[pid]...)
		if inherited.known[process{pid, began[pid]}] {
			for _, child := range children[pid] { // it would be ours when its parent ends
				inherited.known[process{child, began[child]}] = true
			}
		} else if !ended[pid] {
			running = append(running, pid)
		}
	}
	return running
}

// readStat reads the state of a process, its parent and when it began; nothing, if it
// has just ended.
func readStat(pid int) (state string, parent int, began string) {
	data, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	text := string(data)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:]) // the name before them may hold anything
	if len(fields) < 20 {
		return "", 0, ""
	}
	parent, _ = strconv.Atoi(fields[1])
	return fields[0], parent, fields[19]
}
