// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// world is one campaign's hosts: namespaces around a switch, which is a bridge
// in a namespace of its own. Nothing of it touches this machine's network.
type world struct {
	ctx     context.Context
	cancel  context.CancelFunc
	dir     string
	self    string
	binary  string // ringbatch
	verbose bool
	hosts   []*host // the GPU hosts, then the producers' hosts
	mu      sync.Mutex
	all     []*exec.Cmd
}

// host is one namespace and its processes.
type host struct {
	w         *world
	name      string // of the namespace
	address   string
	processes map[string]*exec.Cmd
	args      map[string][]string
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
	name := fmt.Sprintf("rb%d", os.Getpid())
	if err := ip("netns", "add", name); err != nil {
		return err
	}
	defer ip("netns", "del", name)
	if err := ip("-n", name, "link", "add", "b0", "type", "bridge"); err != nil {
		return err
	}
	return ip("-n", name, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
}

// canDelay tells whether this kernel can delay and lose packets by itself.
func canDelay(namespace string) bool {
	ok := exec.Command("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms").Run() == nil
	_ = exec.Command("ip", "netns", "exec", namespace, "tc", "qdisc", "del", "dev", "lo", "root").Run()
	return ok
}

// newWorld makes the network. Host 0 is linked by a cable that can be made bad,
// if asked for.
func newWorld(ctx context.Context, verbose, cable bool) (w *world, err error) {
	w = &world{verbose: verbose}
	w.ctx, w.cancel = context.WithCancel(ctx)
	if w.dir, err = os.MkdirTemp("", "rbhosts"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.self, err = os.Executable(); err != nil {
		return nil, err
	}
	w.binary = filepath.Join(filepath.Dir(w.self), "ringbatch")
	center := w.namespace("sw")
	steps := [][]string{
		{"netns", "add", center},
		{"-n", center, "link", "add", "br0", "type", "bridge"},
		{"-n", center, "link", "set", "br0", "up"},
	}
	for i := range gpuHosts + producerHosts {
		h := &host{w: w, name: w.namespace(fmt.Sprint(i)), address: fmt.Sprintf("198.18.77.%d", i+1), processes: map[string]*exec.Cmd{}, args: map[string][]string{}}
		w.hosts = append(w.hosts, h)
		port := fmt.Sprint("p", i)
		steps = append(steps, []string{"netns", "add", h.name}, []string{"-n", h.name, "link", "set", "lo", "up"})
		if cable && i == 0 {
			continue
		}
		steps = append(steps,
			[]string{"-n", center, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", h.name},
			[]string{"-n", center, "link", "set", port, "master", "br0", "up"},
			[]string{"-n", h.name, "addr", "add", h.address + "/24", "dev", "eth0"},
			[]string{"-n", h.name, "link", "set", "eth0", "up"})
	}
	for _, args := range steps {
		if err = ip(args...); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (w *world) namespace(part string) string { return fmt.Sprintf("rb%d-%s", os.Getpid(), part) }

// close ends every process and takes the network down.
func (w *world) close() {
	w.cancel()
	w.mu.Lock()
	all := w.all
	w.mu.Unlock()
	for _, c := range all {
		_ = c.Process.Signal(syscall.SIGCONT)
		_ = c.Process.Kill()
		_, _ = c.Process.Wait()
	}
	for _, h := range w.hosts {
		_ = ip("netns", "del", h.name)
	}
	_ = ip("netns", "del", w.namespace("sw"))
	_ = os.RemoveAll(w.dir)
}

// start runs a process on the host, and again when it is started anew.
func (h *host) start(name, program string, args ...string) (*exec.Cmd, error) {
	h.args[name] = append([]string{program}, args...)
	dir := filepath.Join(h.w.dir, h.name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	cmd := exec.Command("ip", append([]string{"netns", "exec", h.name, program}, args...)...)
	cmd.Env = append(os.Environ(), "RINGBATCH_SOCKET="+filepath.Join(dir, "b.sock"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if h.w.verbose {
		cmd.Stderr = os.Stderr
	}
	if name == "producer" {
		return cmd, nil
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	h.w.mu.Lock()
	h.w.all = append(h.w.all, cmd)
	h.w.mu.Unlock()
	h.processes[name] = cmd
	return cmd, nil
}

// signal reaches every process of the host.
func (h *host) signal(s syscall.Signal) {
	for _, c := range h.processes {
		_ = c.Process.Signal(s)
	}
}

// end kills the host's processes, or lets them finish.
func (h *host) end(s syscall.Signal) {
	for _, name := range []string{"gateway", "worker", "broker"} {
		if c := h.processes[name]; c != nil {
			_ = c.Process.Signal(s)
			_ = c.Wait()
			delete(h.processes, name)
		}
	}
}

// boot starts a GPU host's processes.
func (h *host) boot(flags ...string) error {
	if _, err := h.start("broker", h.w.binary, "broker", "--log_level", "warn"); err != nil {
		return err
	}
	if _, err := h.start("worker", h.w.self, append([]string{"--role", "worker"}, flags...)...); err != nil {
		return err
	}
	_, err := h.start("gateway", h.w.binary, "gateway", "--http", "off", "--grpc", h.address+":8001", "--insecure", "--drain_delay", "700ms", "--log_level", "warn")
	return err
}

// reboot starts them again as they were.
func (h *host) reboot() error {
	for _, name := range []string{"broker", "worker", "gateway"} {
		args := h.args[name]
		if _, err := h.start(name, args[0], args[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// bootProducer starts a producer host's broker and relay.
func (h *host) bootProducer() error {
	if _, err := h.start("broker", h.w.binary, "broker", "--log_level", "warn"); err != nil {
		return err
	}
	var to []string
	for _, g := range h.w.hosts[:gpuHosts] {
		to = append(to, g.address+":8001")
	}
	_, err := h.start("relay", h.w.binary, "relay", "m", "--to", strings.Join(to, ","), "--wait_for_broker", "120s", "--wait_time", "1ms")
	return err
}

// produce sends the requests of one producer host and gives what it saw.
func (h *host) produce(args ...string) (*report, error) {
	cmd, err := h.start("producer", h.w.self, append([]string{"--role", "producer"}, args...)...)
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("producer of %s: %w", h.name, err)
	}
	var r report
	return &r, json.Unmarshal(out, &r)
}

// link takes the host off the network, or puts it back.
func (h *host) link(up bool) error {
	state := "down"
	if up {
		state = "up"
	}
	return ip("-n", h.w.namespace("sw"), "link", "set", "p"+h.name[strings.LastIndexByte(h.name, '-')+1:], state)
}

// pause waits, unless the campaign is over.
func (w *world) pause(d time.Duration) {
	select {
	case <-w.ctx.Done():
	case <-time.After(d):
	}
}
