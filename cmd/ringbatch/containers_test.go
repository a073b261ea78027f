// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// A container as runtimes make them: private namespaces for mounts, processes, IPC, network
// and the host's name, a read-only /dev/shm, one user. Containers share only the folder of
// the socket.
const container = `
set -e
mount --make-rprivate /
mount -t tmpfs -o ro,size=4k none /dev/shm
user=$1; shift
exec setpriv --pdeathsig KILL --reuid "$user" --regid "$user" --clear-groups --bounding-set=-all "$@"
`

// pod is a group of containers.
type pod struct {
	*cli
	binary, socket string
}

func (p *pod) command(user int, args ...string) []string {
	return append([]string{"unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--net", "--uts", "sh",
		"-c", container, "sh", fmt.Sprint(user)}, args...)
}

// start runs ringbatch in a container beside the test.
func (p *pod) start(user int, args ...string) *testbed.Process {
	p.t.Helper()
	c, err := p.bed.Start(testbed.Spec{Command: p.command(user, append([]string{p.binary}, args...)...),
		Env: []string{"RINGBATCH_SOCKET=" + p.socket}})
	must.Do(p.t, err)
	return c
}

// run runs a command in a container and returns its output.
func (p *pod) run(user int, args ...string) (string, int) {
	c := p.command(user, args...)
	cmd := exec.Command(c[0], c[1:]...)
	cmd.Env = append(os.Environ(), "RINGBATCH_SOCKET="+p.socket)
	out, _ := cmd.CombinedOutput()
	return string(out), cmd.ProcessState.ExitCode()
}

func startPod(t *testing.T) *pod {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can make these namespaces")
	}
	for _, program := range []string{"unshare", "setpriv"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	c := startCLI(t)
	p := &pod{cli: c, binary: c.bed.Path("ringbatch"), socket: c.bed.Path("pod/b.sock")}
	self, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(p.binary, self, 0o755)
	}
	if err == nil {
		err = os.Chmod(c.bed.Dir, 0o755)
	}
	if err == nil {
		err = os.Mkdir(c.bed.Path("pod"), 0o755)
	}
	if err == nil {
		err = os.Chown(c.bed.Path("pod"), owner, owner)
	}
	must.Do(t, err)
	if out, code := p.run(owner, "true"); code != 0 {
		t.Skip("no namespaces here: ", out)
	}
	return p
}

const owner, other, stranger = 31000, 32000, 33000 // users

func TestAPodsContainersShareOnlyTheFolderOfTheSocket(t *testing.T) {
	p := startPod(t)
	config := p.bed.Path("pod.toml")
	text := "open_folder = true\n" + firstConfig + fmt.Sprintf("[[allow]]\nusers = [%d]\nmay = [\"infer\"]\n", other)
	must.Do(t, os.WriteFile(config, []byte(text), 0o644))
	p.start(owner, "broker", "--config", config, "--log-level", "warn")
	worker := p.start(owner, "worker", "affine", "--scale", "2", "--input", "x:f32[4]", "--wait", "1m")
	expect := func(user, code int, says string, args ...string) {
		t.Helper()
		if out, got := p.run(user, args...); got != code || !strings.Contains(out, says) {
			t.Errorf("user %d: %s: status %d, want %d and %q:\n%s", user, strings.Join(args, " "), got, code, says, out)
		}
	}
	p.until("a worker of another container serves", func() bool { _, code := p.run(owner, p.binary, "ready", "affine"); return code == 0 })

	infer := []string{p.binary, "infer", "affine", "1", "2", "3", "4"}
	expect(owner, 0, "2 4 6 8", infer...)
	expect(other, 0, "2 4 6 8", infer...)
	expect(other, 1, "may", p.binary, "set", "affine", "wait_time=1ms") // infer is all that it was given
	expect(stranger, 1, "allow", infer...)

	// A user namespace: the root of the container is the broker's user outside.
	expect(owner, 0, "2 4 6 8", append([]string{"unshare", "--user", "--map-root-user", "--"}, infer...)...)

	// Rings are no files, and fit whatever /dev/shm there is.
	if list, err := os.ReadDir("/dev/shm"); err == nil {
		for _, f := range list {
			if strings.Contains(f.Name(), "ringbatch") {
				t.Errorf("/dev/shm/%s", f.Name())
			}
		}
	}

	// A container that is killed is noticed, though its process has no number here.
	worker.Kill()
	p.until("its worker is missed", func() bool {
		out, code := p.run(owner, p.binary, "ready", "affine")
		return code == 1 && strings.Contains(out, "no worker attached")
	})
	p.start(owner, "worker", "affine", "--scale", "3", "--input", "x:f32[4]")
	p.until("another one serves", func() bool { _, code := p.run(owner, p.binary, "ready", "affine"); return code == 0 })
	expect(other, 0, "3 6 9 12", infer...)
}
