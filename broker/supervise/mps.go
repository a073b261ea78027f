// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/stats"
)

// NVIDIA's Multi-Process Service lets the kernels of several processes run on
// one GPU at the same time; without it they take turns. Its control daemon is
// found by its clients through a folder with pipes.
//
//	a daemon answers in $CUDA_MPS_PIPE_DIRECTORY, or in the usual place  → use it, leave it alone
//	none does, but the program is installed                             → start one of our own, end it at the end
//	the program is not there, or does not start                         → say so, and go on without
type mps struct {
	log     *slog.Logger
	control string // path of nvidia-cuda-mps-control
	pipe    string // folder that clients find the daemon by
	logs    string // folder for its logs; ours only
	own     bool   // ours to stop
	why     string // no MPS, because of this; "" if it is active
}

const (
	mpsControl     = "nvidia-cuda-mps-control"
	mpsDefaultPipe = "/tmp/nvidia-mps"

	mpsStartTime = 30 * time.Second // for a daemon to answer
	mpsStopTime  = 30 * time.Second // for it to end, its workers being gone
)

// startMPS finds or starts a daemon. It always returns something; what it
// could not do is in its log line and in the statistics.
func startMPS(log *slog.Logger, socket string) *mps {
	m := &mps{log: log}
	path, err := exec.LookPath(mpsControl)
	if err != nil {
		return m.without(mpsControl + " is not installed here")
	}
	m.control = path
	m.pipe = os.Getenv("CUDA_MPS_PIPE_DIRECTORY")
	if m.pipe == "" {
		m.pipe = mpsDefaultPipe
	}
	if m.answers() {
		log.Info("MPS: using the daemon that runs", "pipe", m.pipe)
		return m
	}
	folder := filepath.Join(filepath.Dir(socket), "mps-"+strings.TrimSuffix(filepath.Base(socket), ".sock"))
	m.pipe, m.logs, m.own = filepath.Join(folder, "pipe"), filepath.Join(folder, "log"), true
	for _, dir := range []string{m.pipe, m.logs} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return m.without(err.Error())
		}
	}
	if m.answers() {
		log.Info("MPS: taking over the daemon of the broker before this one", "pipe", m.pipe)
		return m
	}
	if out, err := m.run("", "-d"); err != nil {
		return m.without(fmt.Sprintf("%s -d: %v %s", mpsControl, err, out))
	}
	for end := time.Now().Add(mpsStartTime); !m.answers(); {
		if time.Now().After(end) {
			m.stop()
			return m.without("its daemon does not answer; see " + m.logs)
		}
		time.Sleep(50 * time.Millisecond)
	}
	log.Info("MPS: daemon started", "pipe", m.pipe, "logs", m.logs)
	return m
}

func (m *mps) without(why string) *mps {
	m.why, m.own = why, false
	m.log.Warn("no MPS: GPU workers will take turns instead of running together", "why", why)
	return m
}

// run calls the control program with the daemon's folders.
func (m *mps) run(input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), mpsStopTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, m.control, args...)
	cmd.Env = append(os.Environ(), m.environment()...)
	if m.logs != "" {
		cmd.Env = append(cmd.Env, "CUDA_MPS_LOG_DIRECTORY="+m.logs)
	}
	cmd.Stdin = strings.NewReader(input)
	// The daemon inherits what we give it and must not keep our pipes, nor
	// get the Ctrl-C that is meant for the broker.
	var out bytes.Buffer
	if len(args) == 0 {
		cmd.Stdout, cmd.Stderr = &out, &out
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	return strings.TrimSpace(out.String()), err
}

// answers asks the daemon something harmless.
func (m *mps) answers() bool {
	if _, err := os.Stat(filepath.Join(m.pipe, "control")); err != nil {
		return false
	}
	_, err := m.run("get_server_list\n")
	return err == nil
}

func (m *mps) active() bool { return m != nil && m.why == "" }

// environment is what its clients need to find the daemon.
func (m *mps) environment() []string {
	if !m.active() || m.pipe == "" {
		return nil
	}
	return []string{"CUDA_MPS_PIPE_DIRECTORY=" + m.pipe}
}

// stop ends a daemon of our own.
func (m *mps) stop() {
	if m == nil || !m.own {
		return
	}
	out, err := m.run("quit\n")
	for end := time.Now().Add(mpsStopTime); err == nil && m.answers() && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		m.log.Warn("MPS: daemon did not end", "error", err, "output", out)
		return
	}
	m.log.Info("MPS: daemon stopped")
	_ = os.RemoveAll(filepath.Dir(m.pipe))
}

// String is for the statistics.
func (m *mps) String() string {
	switch {
	case m == nil:
		return "off"
	case m.why != "":
		return stats.NoMPS + m.why
	case m.own:
		return "own daemon, pipe " + m.pipe
	}
	return "daemon of the system, pipe " + m.pipe
}
