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

// One client of an MPS server can break the contexts of all: if it is killed while a kernel
// of it runs, or its kernel faults. Then the server refuses new clients until the
// last of the old ones has gone.
//
//	before a worker is killed       → TerminateClient ends its kernels, which harms no other
//	a process is started again      → healMPS asks whether the server has faulted
//	it has                          → all workers are killed, the daemon is started again
const (
	mpsTerminateTime = 3 * time.Second  // for the kernels of a client to end
	mpsGoneTime      = 10 * time.Second // for killed processes, or the daemon, to be gone
	mpsHealPause     = 10 * time.Second // between two of these, so that a GPU that is broken for good does not end workers all the time

	// mpsNotReady is what CUDA says to a new client of a server that has faulted.
	mpsNotReady = "MPS server is not ready to accept new MPS client requests"
)

// usesMPS tells whether the process shares a GPU through MPS. The supervisor's mutex is held.
func (p *process) usesMPS() bool { return p.s.mps != nil && p.s.mps.active() && !p.cfg.Client }

// UsesMPS tells whether an attached worker is a client of MPS, as far as we started it.
func (s *Supervisor) UsesMPS(pid int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.find(pid)
	return p != nil && p.usesMPS()
}

// TerminateClient ends the kernels of a worker that is about to be killed. It takes some
// seconds at most, and may fail: the worker is killed all the same.
func (s *Supervisor) TerminateClient(pid int) {
	s.mu.Lock()
	m := s.mps
	s.mu.Unlock()
	for _, server := range m.servers(mpsTerminateTime) {
		if out, err := m.run(mpsTerminateTime, "terminate_client "+server+" "+strconv.Itoa(pid)+"\n"); err != nil {
			s.log.Warn("MPS: the kernels of a worker could not be ended before it is killed", "pid", pid, "error", err, "output", out)
		}
	}
}

// servers are the pids of the daemon's servers: one for each user, of which we are one.
func (m *mps) servers(within time.Duration) []string {
	out, err := m.run(within, "get_server_list\n")
	if err != nil {
		return nil
	}
	return strings.Fields(out)
}

// hasFaulted tells whether a server takes no new clients, or a daemon of our own is gone.
func (m *mps) hasFaulted(own bool) bool {
	for _, server := range m.servers(mpsAskTime) {
		if out, err := m.run(mpsAskTime, "get_server_status "+server+"\n"); err == nil && strings.Contains(out, "FAULT") {
			return true
		}
	}
	return own && !m.answers()
}

// healMPS looks before the next life of a process whether MPS will serve it, and has it
// serve again if not. refused says that the server has refused the last one. Others that
// are to be started wait here meanwhile.
func (s *Supervisor) healMPS(refused bool) {
	s.healing.Lock()
	defer s.healing.Unlock()
	s.mu.Lock()
	m, stopped, own := s.mps, s.stopped, s.mps != nil && s.mps.own
	s.mu.Unlock()
	if m == nil || !m.active() || stopped || time.Since(s.healed) < mpsHealPause || !refused && !m.hasFaulted(own) {
		return
	}
	s.log.Error("MPS: the server has faulted: ending all of its workers, and starting it again")
	s.killClients()
	if s.Faulted != nil {
		s.Faulted()
	}
	if err := m.restart(own); err != nil {
		s.log.Error("MPS: it does not serve again", "error", err)
	}
	s.healed = time.Now()
}

// killClients ends the processes that use MPS. Their contexts are broken, so there is
// nothing that they could finish; the broker tries their batches on the next ones.
func (s *Supervisor) killClients() {
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

// restart ends the servers, which the daemon replaces with the next client, and a daemon of
// our own as well.
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

// kill ends a daemon of our own that does not end when asked to, and its servers.
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
