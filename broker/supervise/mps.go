// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
)

// mps is NVIDIA's Multi-Process Service. It lets the kernels of several processes run on
// one GPU at the same time; without it they take turns. Clients find its control daemon
// through a folder with pipes.
//
//	a daemon answers in $CUDA_MPS_PIPE_DIRECTORY, or in the usual place
//	and there belongs to root or this user                              → use it, leave it alone
//	none does, but the program is installed                             → start one, and end it at the end
//	the program is not there, or does not start                         → log that, and go on without
type mps struct {
	log     *slog.Logger
	control string // path of nvidia-cuda-mps-control
	pipe    string // folder of the daemon's pipes
	logs    string // folder of our own daemon's logs
	own     bool   // this supervisor stops it
	from    bool   // the old broker started it; ours once that broker has ended
	why     string // why there is no MPS; "" if it is active
}

const (
	mpsControl     = "nvidia-cuda-mps-control"
	mpsDefaultPipe = "/tmp/nvidia-mps"

	mpsStartTime = 30 * time.Second // for a daemon to start
	mpsStopTime  = 30 * time.Second // for it to end after its workers
	mpsAskTime   = 10 * time.Second // for it to answer a question
)

// startMPS finds or starts a daemon. A failure is in the log and in the statistics.
func startMPS(log *slog.Logger, socket string) *mps {
	m := &mps{log: log}
	path, err := exec.LookPath(mpsControl)
	if err != nil {
		return m.without(mpsControl + " is not installed here")
	}
	m.control = path
	if m.pipe = os.Getenv("CUDA_MPS_PIPE_DIRECTORY"); m.pipe == "" && isTrusted(mpsDefaultPipe) {
		m.pipe = mpsDefaultPipe
	}
	if m.pipe != "" && m.answers() {
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
	if !isTrusted(folder) || !isTrusted(m.pipe) {
		return m.without(folder + " belongs to another user")
	}
	if m.answers() {
		log.Info("MPS: taking over the daemon of the broker before this one", "pipe", m.pipe)
		m.from = true
		return m
	}
	if err := m.launch(); err != nil {
		_, _ = m.run(mpsStopTime, "quit\n")
		_ = os.RemoveAll(folder)
		return m.without(err.Error())
	}
	return m
}

// launch starts the daemon, and returns when it answers.
func (m *mps) launch() error {
	if out, err := m.run(mpsStartTime, "", "-d"); err != nil {
		return fmt.Errorf("%s -d: %v %s", mpsControl, err, out)
	}
	for end := time.Now().Add(mpsStartTime); !m.answers(); time.Sleep(mpsPoll) {
		if time.Now().After(end) {
			return fmt.Errorf("its daemon does not answer; see %s", m.logs)
		}
	}
	m.log.Info("MPS: daemon started", "pipe", m.pipe, "logs", m.logs)
	return nil
}

// mpsPoll is how often a daemon that starts or ends is asked.
const mpsPoll = 50 * time.Millisecond

// isTrusted says whether a folder of pipes, and the daemon's pipe in it, belong to root or
// to this user. Any user could make a folder of that name in /tmp, and see the GPU's data.
func isTrusted(folder string) bool {
	for _, path := range []string{folder, filepath.Join(folder, "control")} {
		var st syscall.Stat_t
		err := syscall.Lstat(path, &st)
		switch {
		case errors.Is(err, syscall.ENOENT):
		case err != nil || st.Mode&syscall.S_IFMT == syscall.S_IFLNK || st.Uid != 0 && int(st.Uid) != os.Getuid():
			return false
		}
	}
	return true
}

func (m *mps) without(why string) *mps {
	m.why, m.own = why, false
	m.log.Warn("no MPS: GPU workers will take turns instead of running together", "why", why)
	return m
}

// run calls the control program with the daemon's folders.
func (m *mps) run(within time.Duration, input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	cmd := exec.CommandContext(ctx, m.control, args...)
	cmd.Env = append(os.Environ(), m.environment()...)
	if m.logs != "" {
		cmd.Env = append(cmd.Env, "CUDA_MPS_LOG_DIRECTORY="+m.logs)
	}
	cmd.Stdin = strings.NewReader(input)
	// The daemon must not inherit our pipes, nor get the broker's Ctrl-C.
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
	_, err := m.run(mpsAskTime, "get_server_list\n")
	return err == nil
}

func (m *mps) isActive() bool { return m != nil && m.why == "" }

// environment lets clients find the daemon.
func (m *mps) environment() []string {
	if !m.isActive() || m.pipe == "" {
		return nil
	}
	return []string{"CUDA_MPS_PIPE_DIRECTORY=" + m.pipe}
}

// stop ends our own daemon.
func (m *mps) stop() {
	if m == nil || !m.own {
		return
	}
	out, err := m.run(mpsStopTime, "quit\n")
	for end := time.Now().Add(mpsStopTime); err == nil && m.answers() && time.Now().Before(end); {
		time.Sleep(mpsPoll)
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
