// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/test/testbed"
)

// world is one campaign's hosts: namespaces around a switch, a bridge in a further
// namespace. This machine's network is not touched.
type world struct {
	ctx    context.Context
	bed    *testbed.Bed
	binary string            // ringbatch
	onLog  func(line []byte) // of each process
	hosts  []*host           // the GPU hosts, then the producers' hosts
}

// host is one namespace and its processes.
type host struct {
	w         *world
	name      string // of the namespace
	port      string // of the switch
	address   string
	processes map[string]*testbed.Process
}

const (
	gpuHosts      = 3
	producerHosts = 2
)

func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

func canMakeNamespaces() error {
	name := namespace("try")
	if err := ip("netns", "add", name); err != nil {
		return err
	}
	defer ip("netns", "del", name)
	if err := ip("-n", name, "link", "add", "b0", "type", "bridge"); err != nil {
		return err
	}
	return ip("-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
}

func namespace(part string) string { return fmt.Sprintf("rb%d-%s", os.Getpid(), part) }

// newWorld makes the network.
func newWorld(ctx context.Context, verbose bool) (w *world, err error) {
	w = &world{ctx: ctx}
	if verbose {
		w.onLog = func(line []byte) { fmt.Fprintf(os.Stderr, "%s\n", line) }
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	w.binary = filepath.Join(filepath.Dir(self), "ringbatch")
	if w.bed, err = testbed.New(ctx); err != nil {
		return nil, err
	}
	center := namespace("sw")
	steps := [][]string{
		{"netns", "add", center},
		{"-n", center, "link", "add", "br0", "type", "bridge"},
		{"-n", center, "link", "set", "br0", "up"},
	}
	for i := range gpuHosts + producerHosts {
		h := &host{w, namespace(fmt.Sprint(i)), fmt.Sprint("p", i), fmt.Sprintf("198.18.77.%d", i+1), map[string]*testbed.Process{}}
		w.hosts = append(w.hosts, h)
		steps = append(steps,
			[]string{"netns", "add", h.name},
			[]string{"-n", h.name, "link", "set", "lo", "up"},
			[]string{"-n", center, "link", "add", h.port, "type", "veth", "peer", "name", "eth0", "netns", h.name},
			[]string{"-n", center, "link", "set", h.port, "master", "br0", "up"},
			[]string{"-n", h.name, "addr", "add", h.address + "/24", "dev", "eth0"},
			[]string{"-n", h.name, "link", "set", "eth0", "up"})
		err = errors.Join(err, os.Mkdir(w.bed.Path(h.name), 0o700))
	}
	for _, args := range steps {
		if err == nil {
			err = ip(args...)
		}
	}
	if err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

// close ends every process and takes the network down.
func (w *world) close() {
	w.bed.Close()
	for _, h := range w.hosts {
		_ = ip("netns", "del", h.name)
	}
	_ = ip("netns", "del", namespace("sw"))
}

// inside runs a command in the host's namespace.
func (h *host) inside(command ...string) []string {
	return append([]string{"ip", "netns", "exec", h.name}, command...)
}

func (h *host) start(name string, s testbed.Spec) (*testbed.Process, error) {
	s.Env, s.OnLog = []string{"RINGBATCH_SOCKET=" + filepath.Join(h.w.bed.Path(h.name), "b.sock")}, h.w.onLog
	p, err := h.w.bed.Start(s)
	if err == nil {
		h.processes[name] = p
	}
	return p, err
}

// ringbatch starts a command of it on the host.
func (h *host) ringbatch(name string, args ...string) error {
	_, err := h.start(name, testbed.Spec{Command: h.inside(append([]string{h.w.binary, name}, args...)...)})
	return err
}

// boot starts a GPU host's processes.
func (h *host) boot() error {
	_, err := h.start("worker", testbed.Spec{Role: "worker", Wrap: h.inside()})
	return errors.Join(err, h.ringbatch("broker", "--log-level", "warn"), h.ringbatch("gateway", "--http", "off",
		"--grpc", h.address+":8001", "--insecure", "--drain-delay", "700ms", "--log-level", "warn"))
}

// bootProducer starts a producer host's broker and relay.
func (h *host) bootProducer() error {
	var to []string
	for _, g := range h.w.hosts[:gpuHosts] {
		to = append(to, g.address+":8001")
	}
	return errors.Join(h.ringbatch("broker", "--log-level", "warn"),
		h.ringbatch("relay", "m", "--to", strings.Join(to, ","), "--wait", "120s", "--wait-time", "1ms"))
}

// signal reaches every process of the host.
func (h *host) signal(s syscall.Signal) {
	for _, p := range h.processes {
		p.Signal(s)
	}
}

// shutDown lets the host's processes finish.
func (h *host) shutDown() {
	for _, name := range []string{"gateway", "worker", "broker"} {
		_ = h.processes[name].Stop(time.Minute)
	}
}

// link takes the host off the network, or puts it back.
func (h *host) link(state string) error {
	return ip("-n", namespace("sw"), "link", "set", h.port, state)
}

// disturb delays and drops packets of the host, by the kernel's netem.
func (h *host) disturb(delay, loss string) error {
	return ip("netns", "exec", h.name, "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", delay, "loss", loss)
}

// pause waits, unless the campaign is over.
func (w *world) pause(d time.Duration) {
	select {
	case <-w.ctx.Done():
	case <-time.After(d):
	}
}
