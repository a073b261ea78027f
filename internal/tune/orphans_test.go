// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"bufio"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// startShell starts a shell that starts a process and waits; its number comes back
// when both run.
func startShell(t *testing.T) (shell *exec.Cmd, child int) {
	t.Helper()
	shell = exec.Command("sh", "-c", "sleep 1000 & echo $!; wait")
	out, err := shell.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := shell.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	child, _ = strconv.Atoi(strings.TrimSpace(line))
	t.Cleanup(func() {
		_ = shell.Process.Kill()
		if !gone(child) {
			_ = syscall.Kill(child, syscall.SIGKILL)
		}
		_ = shell.Wait()
	})
	return shell, child
}

func gone(pid int) bool {
	state, _, _ := readStat(pid)
	return state == "" || state == "Z" || state == "X"
}

func TestProcessesThatWereThereBeforeGoOnRunning(t *testing.T) {
	if err := adoptOrphans(); err != nil { // or what the shell started is nobody's for a moment
		t.Fatal(err)
	}
	before, below := startShell(t)
	spareInherited()
	own, ownBelow := startShell(t)
	endDescendants(0)
	if gone(before.Process.Pid) || gone(below) {
		t.Error("a process that was there before was ended")
	}
	if !gone(own.Process.Pid) || !gone(ownBelow) {
		t.Error("a process that was started is left")
	}
}
