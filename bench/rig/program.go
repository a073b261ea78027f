// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/internal/testlog"
)

// Program is a ringbatch command that a suite measures as users start it.
type Program struct {
	cmd     *exec.Cmd
	printed testlog.Log
}

// StartProgram runs `ringbatch ARGS…` at a broker. The binary is $RINGBATCH_BINARY, or ringbatch in the folder of this program.
func (r *Rig) StartProgram(socket string, args ...string) (*Program, error) {
	binary := os.Getenv("RINGBATCH_BINARY")
	if binary == "" {
		self, err := os.Executable()
		if err != nil {
			return nil, err
		}
		binary = filepath.Join(filepath.Dir(self), "ringbatch")
	}
	p := &Program{cmd: exec.CommandContext(r.Context(), binary, append(args, "--log_level", "error")...)}
	p.cmd.Env = append(os.Environ(), "RINGBATCH_SOCKET="+socket)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.cmd.Stdout, p.cmd.Stderr = &p.printed, os.Stderr
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	return p, nil
}

// Stop ends it. The context of the bed does so, too.
func (p *Program) Stop() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.cmd.Wait()
}

// Pid is the number of the process.
func (p *Program) Pid() int { return p.cmd.Process.Pid }

// Find waits for a line with that beginning and returns the rest of it.
func (p *Program) Find(prefix string) (string, error) {
	const patience = 20 * time.Second
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		for _, line := range strings.SplitAfter(p.printed.String(), "\n") {
			if rest, ok := strings.CutPrefix(line, prefix); ok && strings.HasSuffix(rest, "\n") {
				return strings.TrimSpace(rest), nil
			}
		}
	}
	return "", fmt.Errorf("%s printed no line %q in %v", p.cmd, prefix, patience)
}
