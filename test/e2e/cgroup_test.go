// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// group is a memory cgroup of a test.
type group struct {
	t   *testing.T
	dir string
}

// newGroup makes a group of mib MiB that is removed when the test ends. Hosts whose
// processes join it must be made later, so that they end earlier.
func newGroup(t *testing.T, mib int) *group {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to make a memory cgroup")
	}
	parent, limit, err := parentGroup()
	if err != nil {
		t.Skip(err)
	}
	g := &group{t, filepath.Join(parent, fmt.Sprintf("ringbatch-test-%d", os.Getpid()))}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		t.Skipf("memory cgroups cannot be made here: %v", err)
	}
	t.Cleanup(func() {
		must.Check(t, testbed.Eventually(patience, func() error { return os.Remove(g.dir) }))
	})
	must.Do(t, os.WriteFile(filepath.Join(g.dir, limit), []byte(strconv.Itoa(mib<<20)), 0o644))
	return g
}

// parentGroup is the folder for new groups and the name of the file with their limit.
// With version 1 it is the group of this process. With version 2 a group has either
// processes or limited children, so it is the root.
func parentGroup() (dir, limit string, err error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", "", fmt.Errorf("no control groups here: %w", err)
	}
	for line := range bytes.Lines(text) {
		if _, path, ok := strings.Cut(strings.TrimSpace(string(line)), ":memory:"); ok {
			return filepath.Join("/sys/fs/cgroup/memory", path), "memory.limit_in_bytes", nil
		}
	}
	if on, _ := os.ReadFile("/sys/fs/cgroup/cgroup.subtree_control"); bytes.Contains(on, []byte("memory")) {
		return "/sys/fs/cgroup", "memory.max", nil
	}
	return "", "", errors.New("the memory controller of control groups cannot be used here")
}

// noKills fails the test if the kernel killed a process of the group.
func (g *group) noKills() {
	g.t.Helper()
	for _, name := range []string{"memory.oom_control", "memory.events"} {
		text, _ := os.ReadFile(filepath.Join(g.dir, name))
		for line := range bytes.Lines(text) {
			if n, ok := strings.CutPrefix(strings.TrimSpace(string(line)), "oom_kill "); ok && n != "0" {
				g.t.Errorf("the kernel killed %s processes", n)
			}
		}
	}
}

// sized is a model whose ring of 8 slots takes mib MiB.
func sized(name string, mib int) testbed.Model {
	return testbed.Model{Name: name, Slots: 8, MaxBatch: 4, Wait: time.Millisecond, Lease: lease, Width: mib << 20 / 8 / 8 / 2}
}

func TestABrokerInASmallMemoryCgroupRefusesWhatDoesNotFitAndServesTheRest(t *testing.T) {
	g := newGroup(t, 96) // internal/cgroup tests outer groups and other users of the memory
	h := idleHost(t, theModel)
	h.limits.Group = g.dir
	h.startBroker()

	h.newWorker(job{Model: sized("large", 512)}).refused(status.ErrNoMemory, "memory cgroup "+g.dir)
	w, c := h.worker(theModel), h.dial()
	works(t, c, 20)
	fits := sized("small", 16)
	h.worker(fits)
	small, err := client.Dial(background(t), "small", client.WithSocket(h.socket), client.WithWindow(8))
	must.Do(t, err)
	if err := askSized(background(t), small, fits.Width, cmdAnswer, 0, 4); err != nil {
		t.Errorf("a model that fits: %v", err)
	}
	open := sized("open", 16)
	open.Slots, open.MaxBatch = 0, 1 // 2 MiB each; without the limit there would be 512
	h.worker(open)
	if n := h.model("open").Slots; n < 4 || n > 24 {
		t.Errorf("%d slots of 2 MiB in a group of 96", n)
	}
	small.Close()
	c.Close()
	w.Kill()
	g.noKills()
	h.stop()

	h.job.Models = append(h.job.Models, sized("large", 512))
	configured := h.launch()
	configured.refused(status.ErrNoMemory)
	configured.exits(1)
	g.noKills()
}

// exits waits for the end of the process and checks its status.
func (p *proc) exits(status int) {
	p.t.Helper()
	if _ = p.end(); p.State().ExitCode() != status {
		p.t.Errorf("%s ended with %v", p, p.State())
	}
}

func TestAClientInASmallMemoryCgroupIsToldNoMemory(t *testing.T) {
	g := newGroup(t, 64)
	m := sized("m", 256)
	h := newHost(t, m)
	h.worker(m)
	with := func(window int) *proc {
		return h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: m, Do: "read", Window: window},
			Limits: testbed.Limits{Group: g.dir}})
	}
	large := with(4) // 128 MiB
	large.refused(status.ErrNoMemory)
	large.exits(1)
	for range 3 { // the pages of the first fill the group, and the others reuse them
		p := with(1)
		p.expect("read")
		p.Kill()
		h.until("its window is back", "m", func(m stats.Model) bool { return m.SlotsFree == m.Slots })
	}
	g.noKills()
	c := h.dial(client.WithWindow(8)) // this process has no limit
	must.Check(t, askSized(background(t), c, m.Width, cmdAnswer, 0, 1))
	c.Close()
	h.settled()
}
