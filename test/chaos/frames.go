// SPDX-License-Identifier: Apache-2.0

package chaos

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// brokerRoom is the memory that the broker has in this campaign.
const brokerRoom = 128 << 20

// unfinishedFrames has many connections begin what they do not end, with the
// broker in a small memory cgroup: it must neither be killed there nor slow
// down for others.
func unfinishedFrames(r *run) {
	group, err := newGroup(brokerRoom)
	if err != nil {
		r.notJudged("whether the broker stays within its memory cgroup: %v", err)
	} else {
		defer func() {
			r.bed.Close()
			err := testbed.Eventually(enoughTime, func() error { return os.Remove(group) })
			r.check(err == nil, "the control group is left: %v", err)
		}()
	}
	job := r.brokerJob()
	job.Models[0].Slots = 256
	h := r.startHost(job, 1, testbed.Spec{Limits: testbed.Limits{Group: group}})
	h.load(loadJob{Load: 4, Pause: 2000})
	h.keeps = brokerRoom / 2
	before := r.usage(h.broker)
	for i := range r.events {
		way := i % len(sendings)
		p := r.start(testbed.Spec{Role: "sender", Job: senderJob{r.socket(), way, 800, r.seed()}, Procs: 2})
		_ = unix.Setpriority(unix.PRIO_PROCESS, p.Pid(), 19)
		err := p.Expect("sent", nil, 2*enoughTime)
		r.check(err == nil, "%s: %v", sendings[way].name, err)
		r.check(h.broker.Running(), "%s: the broker died: %v", sendings[way].name, h.broker.State())
		err = r.ping(r.socket(), 0)
		r.check(err == nil, "%s: an honest client cannot attach: %v", sendings[way].name, err)
		now := r.usage(h.broker)
		r.check(now.Peak <= before.Peak+brokerRoom/2, "%s: the broker took %d MiB", sendings[way].name, (now.Peak-before.Peak)>>20)
		r.bed.End(p)
		r.progress(i + 1)
	}
	now := r.usage(h.broker)
	fmt.Printf("   the broker's peak: %d → %d MiB\n", before.Peak>>20, now.Peak>>20)
	h.endLoads()
	h.settled()
}

// newGroup makes a memory cgroup.
func newGroup(limit int) (string, error) {
	if os.Getuid() != 0 {
		return "", errors.New("only root can make one")
	}
	parent, file := "/sys/fs/cgroup", "memory.max"
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if _, path, ok := strings.Cut(strings.TrimSpace(line), ":memory:"); ok { // version 1
			parent, file = filepath.Join("/sys/fs/cgroup/memory", path), "memory.limit_in_bytes"
		}
	}
	dir := filepath.Join(parent, fmt.Sprintf("ringbatch-chaos-%d", os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, file), []byte(strconv.Itoa(limit)), 0o644); err != nil {
		_ = os.Remove(dir)
		return "", err
	}
	return dir, nil
}

// sendings are ways to begin and not to end.
var sendings = []struct {
	name string
	send func(c *net.UnixConn, rng *rand.Rand)
}{
	{"one byte short of the longest request", func(c *net.UnixConn, _ *rand.Rand) { sendShort(c, control.MaxRequest, 1) }},
	{"one byte short of the longest frame", func(c *net.UnixConn, _ *rand.Rand) { sendShort(c, control.MaxFrame, 1) }},
	{"half of any length", func(c *net.UnixConn, rng *rand.Rand) {
		n := 1 + rng.IntN(control.MaxRequest)
		sendShort(c, n, (n+1)/2)
	}},
	{"a length and nothing more", func(c *net.UnixConn, rng *rand.Rand) {
		_, _ = c.Write(binary.LittleEndian.AppendUint32(nil, rng.Uint32()))
	}},
	{"half a length", func(c *net.UnixConn, _ *rand.Rand) { _, _ = c.Write([]byte{1, 0}) }},
	{"with descriptors", func(c *net.UnixConn, _ *rand.Rand) {
		head := binary.LittleEndian.AppendUint32(nil, control.MaxRequest)
		_, _, _ = c.WriteMsgUnix(head, unix.UnixRights(0, 1, 2, 0, 1, 2, 0, 1), nil)
	}},
	{"byte by byte", func(c *net.UnixConn, _ *rand.Rand) {
		_, _ = c.Write(binary.LittleEndian.AppendUint32(nil, control.MaxRequest))
		go func() {
			for {
				if _, err := c.Write([]byte{0x90}); err != nil {
					return
				}
				time.Sleep(20 * time.Millisecond)
			}
		}()
	}},
	{"replies that nobody reads", func(c *net.UnixConn, _ *rand.Rand) {
		_ = c.SetReadBuffer(1)
		for range 8 {
			if control.Send(c, time.Now().Add(20*time.Millisecond), &control.Request{Version: control.Version, Op: control.OpStats}) != nil {
				return
			}
		}
	}},
}

func sendShort(c *net.UnixConn, size, missing int) {
	frame := binary.LittleEndian.AppendUint32(nil, uint32(size))
	_, _ = c.Write(append(frame, bytes.Repeat([]byte{0x90}, size-missing)...))
}

type senderJob struct {
	Socket      string
	Way         int
	Connections int
	Seed        uint64
}

// playSender has many connections, all of which begin something.
func playSender(c *testbed.Child, job senderJob) error {
	rng := rand.New(rand.NewPCG(job.Seed, 5))
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 4096, Max: 4096})
	for range job.Connections {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: job.Socket, Net: "unix"})
		if err != nil {
			break
		}
		_ = conn.SetWriteDeadline(time.Now().Add(30 * time.Millisecond)) // the broker may have refused it
		sendings[job.Way].send(conn, rng)
		_ = conn.SetWriteDeadline(time.Time{})
	}
	_ = c.Tell("sent", nil)
	<-c.Context().Done()
	return nil
}
