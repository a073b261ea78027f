// SPDX-License-Identifier: Apache-2.0

package supervise

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// memoryTime is how long nvidia-smi may take: without a persistent driver it takes seconds.
const memoryTime = 20 * time.Second

// MeasureMemory returns the bytes of its GPU that a process of each declaration of a model
// takes, children included: those of the process that takes the most. nvidia-smi tells the
// memory by process, so other programs do not count. A process that has not attached
// yet does not count. One that it does not list is an error: it may see other pids.
func (s *Supervisor) MeasureMemory(ctx context.Context, model string) (by map[int]int64, err error) {
	others := func(p *process) bool {
		return p.model != model || p.pid == 0 || p.sessions == 0 || len(p.cfg.GPUs) == 0
	}
	var procs []*process
	s.locked(func() { procs = slices.DeleteFunc(slices.Clone(s.procs), others) })
	ctx, cancel := context.WithTimeout(ctx, memoryTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits").Output()
	if err != nil {
		return nil, fmt.Errorf("nvidia-smi: %w", errors.Join(err, ctx.Err()))
	}
	kin := map[int][]int{}
	used := parseMemory(string(out))
	for pid := range used {
		kin[pid], _ = kinOf(pid)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := map[*process]int64{}
	for pid, bytes := range used {
		if p := s.findKin(kin[pid]); p != nil {
			taken[p] += bytes
		}
	}
	by = map[int]int64{}
	for _, p := range slices.DeleteFunc(procs, others) {
		if taken[p] == 0 {
			return nil, fmt.Errorf("%w: nvidia-smi lists no memory of %s, pid %d; in a container it needs the host's pids", status.ErrNoGPU, p.name, p.pid)
		}
		by[p.pool.n] = max(by[p.pool.n], taken[p])
	}
	return by, nil
}

// parseMemory reads lines like "4711, 6144": a pid, and MiB. A process has a line for each
// GPU that it uses. Text instead of a number is unknown memory.
func parseMemory(text string) map[int]int64 {
	used := map[int]int64{}
	for line := range strings.Lines(text) {
		pid, mib, _ := strings.Cut(line, ",")
		id, err1 := strconv.Atoi(strings.TrimSpace(pid))
		n, err2 := strconv.ParseInt(strings.TrimSpace(mib), 10, 32)
		if err1 == nil && err2 == nil && id > 0 && n > 0 {
			used[id] += n << 20
		}
	}
	return used
}
