// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

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

// TerminateClient ends the kernels of a worker that is about to be killed. It takes some
// seconds at most, and may fail.
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

// restart ends the servers, which the daemon starts again for the next client. It also
// restarts our own daemon.
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

// kill kills our own daemon and its servers.
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
