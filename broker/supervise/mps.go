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
	"strconv"
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

func (m *mps) environment() []string {
	if !m.isActive() || m.pipe == "" {
		return nil
	}
	return []string{"CUDA_MPS_PIPE_DIRECTORY=" + m.pipe}
}

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

// A client of an MPS server breaks the contexts of all clients if it is killed while its
// kernel runs, or if its kernel faults. Then the server refuses new clients until the
// last old client has gone.
//
//	before a worker is killed       → TerminateClient ends its kernels, which harms no other
//	before a process is restarted   → healMPS asks whether the server has faulted
//	the server has faulted          → all workers are killed, the daemon is started again
const (
	mpsTerminateTime = 3 * time.Second  // for the kernels of a client to end
	mpsGoneTime      = 10 * time.Second // for killed processes, or the daemon, to be gone
	mpsHealPause     = 10 * time.Second // between two restarts, should the GPU stay broken

	// mpsNotReady is CUDA's message to a new client of a server that has faulted.
	mpsNotReady = "MPS server is not ready to accept new MPS client requests"
)

// usesMPS says whether the process shares a GPU through MPS. The supervisor's mutex is held.
func (p *process) usesMPS() bool { return p.s.mps.isActive() && !p.cfg.Client }

// UsesMPS says whether an attached worker is a supervised client of MPS.
func (s *Supervisor) UsesMPS(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.findProcess(pid)
	return p != nil && p.usesMPS()
}

// TerminateClient ends a worker's kernels before it is killed. It takes seconds, and may fail.
func (s *Supervisor) TerminateClient(pid int) {
	s.mu.Lock()
	m := s.mps
	s.mu.Unlock()
	for _, server := range m.servers(mpsTerminateTime) {
		if out, err := m.run(mpsTerminateTime, "terminate_client "+server+" "+strconv.Itoa(pid)+"\n"); err != nil {
			s.log.Warn("MPS: the kernels of a worker could not be ended before it is killed",
				"pid", pid, "error", err, "output", out)
		}
	}
}

// servers lists the pids of the daemon's servers, one for each user.
func (m *mps) servers(within time.Duration) []string {
	out, err := m.run(within, "get_server_list\n")
	if err != nil {
		return nil
	}
	return strings.Fields(out)
}

// hasFaulted says whether a server takes no new clients, or our own daemon is gone.
func (m *mps) hasFaulted(own bool) bool {
	for _, server := range m.servers(mpsAskTime) {
		if out, err := m.run(mpsAskTime, "get_server_status "+server+"\n"); err == nil && strings.Contains(out, "FAULT") {
			return true
		}
	}
	return own && !m.answers()
}

// healMPS restarts a faulted MPS before the next life of a process. refused says that the
// server has refused the last life. Other processes wait here meanwhile.
func (s *Supervisor) healMPS(refused bool) {
	s.healing.Lock()
	defer s.healing.Unlock()
	s.mu.Lock()
	m, stopped, own := s.mps, s.stopped, s.mps != nil && s.mps.own
	s.mu.Unlock()
	if !m.isActive() || stopped || time.Since(s.healed) < mpsHealPause || !refused && !m.hasFaulted(own) {
		return
	}
	s.log.Error("MPS: the server has faulted: ending all of its workers, and starting it again")
	s.killMPSClients()
	if s.Faulted != nil {
		s.Faulted()
	}
	if err := m.restart(own); err != nil {
		s.log.Error("MPS: the daemon could not be started again", "error", err)
	}
	s.healed = time.Now()
}

// killMPSClients kills the processes that use MPS. Their contexts are broken, so they
// cannot finish. The broker gives their batches to the next workers.
func (s *Supervisor) killMPSClients() {
	killed := map[*process]int{}
	s.mu.Lock()
	for _, p := range s.procs {
		if p.pid != 0 && p.usesMPS() {
			killed[p] = p.pid
			_ = syscall.Kill(-p.pid, syscall.SIGKILL)
		}
	}
	s.mu.Unlock()
	for end := time.Now().Add(mpsGoneTime); len(killed) > 0 && time.Now().Before(end); time.Sleep(restPoll) {
		s.mu.Lock()
		for p, pid := range killed {
			if p.pid != pid {
				delete(killed, p)
			}
		}
		s.mu.Unlock()
	}
}

// restart restarts our own daemon. Servers come back with their next client.
func (m *mps) restart(own bool) error {
	servers := m.servers(mpsAskTime)
	for _, server := range servers {
		_, _ = m.run(mpsAskTime, "shutdown_server "+server+" -f\n")
	}
	if !own {
		return nil
	}
	_, _ = m.run(mpsAskTime, "quit -t 1\n")
	for end := time.Now().Add(mpsGoneTime); m.answers(); time.Sleep(mpsPoll) {
		if time.Now().After(end) {
			m.kill(servers)
			break
		}
	}
	return m.launch()
}

func (m *mps) kill(servers []string) {
	text, _ := os.ReadFile(filepath.Join(m.pipe, mpsControl+".pid"))
	for _, pid := range append(servers, strings.TrimSpace(string(text))) {
		n, err := strconv.Atoi(pid)
		if err != nil || n <= 1 {
			continue
		}
		if err := syscall.Kill(n, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			m.log.Warn("MPS: a process does not end", "pid", n, "error", err)
		}
	}
	_ = os.Remove(filepath.Join(m.pipe, "control"))
}
