// SPDX-License-Identifier: Apache-2.0

package cbindings

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/inside"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// Device memory on the stub of the CUDA driver (hack/cuda/stub): real processes,
// of which testdata/device.c is one, and a real broker.

const deviceSignature = "x:f32[1024]@device:0 -> y:f32[1024]@device:0 sum:f32[]"

// slowStream pauses each copy of a stream in the middle of the row.
const slowStream = "STUB_CUDA_DELAY_US=3000"

// bed is a broker and the program and environment of the processes beside it.
type bed struct {
	t      *testing.T
	socket string
	exe    string
	env    []string
}

// stubDriver is the environment of a process that uses the stub.
func stubDriver(t *testing.T) string {
	t.Helper()
	stub := filepath.Join(built, "stub", "libcuda.so.1")
	once(t, stub, func() error {
		err := os.MkdirAll(filepath.Dir(stub), 0o755)
		if err == nil {
			_, err = tryRun("cc", "-O1", "-g", "-shared", "-fPIC", "-pthread", "-o", stub, "../hack/cuda/stub/libcuda.c")
		}
		return err
	})
	return "RINGBATCH_LIBCUDA=" + stub
}

func deviceBed(t *testing.T, sanitizer string) *bed {
	t.Helper()
	exe := filepath.Join(built, "device")
	if sanitizer != "" {
		exe = sanitizedProgram(t, sanitizer, "device", "testdata/device.c")
	} else {
		archive := library(t) + "/lib/libringbatch.a"
		once(t, exe, func() error {
			_, err := tryRun("cc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-I.", "-pthread",
				"-o", exe, "testdata/device.c", archive, "-ldl")
			return err
		})
	}
	return &bed{t: t, socket: startBroker(t), exe: exe, env: []string{stubDriver(t)}}
}

// role is a process of the bed.
type role struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines *bufio.Scanner
	said  []string
	stdin *os.File
}

func (b *bed) start(env []string, args ...string) *role {
	b.t.Helper()
	out, in, err := os.Pipe()
	must.Do(b.t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute) // it hangs
	r := &role{t: b.t, cmd: exec.CommandContext(ctx, b.exe, args...), lines: bufio.NewScanner(out)}
	r.cmd.Env = append(append(os.Environ(), b.env...), env...)
	r.cmd.Stdout, r.cmd.Stderr = in, in
	stdin, err := r.cmd.StdinPipe()
	must.Do(b.t, err)
	r.stdin = stdin.(*os.File)
	must.Do(b.t, r.cmd.Start())
	in.Close()
	b.t.Cleanup(func() {
		cancel()
		_ = r.cmd.Wait()
		out.Close()
	})
	return r
}

// until reads the role's output up to a line that begins so.
func (r *role) until(begin string) string {
	r.t.Helper()
	for r.lines.Scan() {
		r.said = append(r.said, r.lines.Text())
		if strings.HasPrefix(r.lines.Text(), begin) {
			return r.lines.Text()
		}
	}
	r.t.Fatalf("it said %q, and never %q", r.said, begin)
	return ""
}

func (b *bed) worker(model string, env ...string) *role {
	b.t.Helper()
	w := b.start(env, "worker", b.socket, model, deviceSignature)
	w.until("attached GPU-61616161-")
	return w
}

func (r *role) kill() {
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
}

// deviceDescriptors counts the descriptors of the stub's memory in this process, which runs the brokers. A test that
// counts does not run in parallel.
func deviceDescriptors(t *testing.T) (n int) {
	t.Helper()
	fds, err := filepath.Glob("/proc/self/fd/*")
	must.Do(t, err)
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && strings.Contains(to, "stub-cuda-") {
			n++
		}
	}
	return n
}

// waitForDescriptors waits until the broker has that many descriptors.
func waitForDescriptors(t *testing.T, want int) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); deviceDescriptors(t) != want; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the broker has %d descriptors of device memory, want %d", deviceDescriptors(t), want)
		}
	}
}

func TestNoWorkerReadsHalfARowThatAStreamWrites(t *testing.T) {
	t.Parallel()
	b := deviceBed(t, "")
	b.worker("m")
	for _, how := range []string{"stream", "patient"} {
		if got := b.start([]string{slowStream}, "client", b.socket, "m", "12", how).until("torn"); got != "torn 0, wrong 0, gone 0" {
			t.Errorf("%s: %s", how, got)
		}
	}
	// The test notices a client that commits without waiting for its stream: its rows are half written, or old.
	hasty := b.start([]string{"STUB_CUDA_GATE=" + filepath.Join(t.TempDir(), "gate")}, "client", b.socket, "m", "4", "hasty")
	if got := hasty.until("torn"); got == "torn 0, wrong 0, gone 0" {
		t.Errorf("hasty: %s", got)
	}
	// The library waits for streams that are done within a moment.
	if got := b.start(nil, "client", b.socket, "m", "200", "stream").until("torn"); got != "torn 0, wrong 0, gone 0" {
		t.Errorf("a fast stream: %s", got)
	}
}

func TestCommitsOnAStreamUnderSanitizers(t *testing.T) {
	t.Parallel()
	for _, sanitizer := range []string{"address,undefined", "thread"} {
		t.Run(sanitizer, func(t *testing.T) {
			t.Parallel()
			b := deviceBed(t, sanitizer)
			// Device memory is counted by the program; the sanitizer cannot look for leaks while the stub's threads are there.
			b.env = append(b.env, "TSAN_OPTIONS=halt_on_error=1", "ASAN_OPTIONS=detect_leaks=0")
			b.worker("m")
			b.start([]string{slowStream}, "client", b.socket, "m", "8", "stream").until("torn 0, wrong 0, gone 0")
			b.start([]string{slowStream}, "closing", b.socket, "m").until("ok")
		})
	}
}

func TestAStreamThatFailsEndsItsRequests(t *testing.T) {
	t.Parallel()
	b := deviceBed(t, "")
	b.worker("m")
	b.start([]string{"STUB_CUDA_GATE=/never", "STUB_CUDA_BROKEN=" + filepath.Join(t.TempDir(), "broken")}, "broken", b.socket,
		"m").until("ok")
}

func TestASlotThatAStreamWritesIsNotTheNextClients(t *testing.T) {
	t.Parallel()
	b := deviceBed(t, "")
	b.worker("m")
	b.start([]string{"STUB_CUDA_GATE=" + filepath.Join(t.TempDir(), "gate")}, "written", b.socket, "m").until("ok")
}

func TestAStreamKeepsASlotOnlyIfItMayStillUseIt(t *testing.T) {
	t.Parallel()
	b := deviceBed(t, "")
	for model, answers := range map[string]string{"m": "@device:0", "h": ""} {
		env := []string{"STUB_CUDA_GATE=" + filepath.Join(t.TempDir(), "gate")}
		var host []string
		if answers == "" {
			host = []string{"ANSWERS_ON_HOST=1"}
		}
		b.start(host, "worker", b.socket, model, "x:f32[1024]@device:0 -> y:f32[1024]"+answers+" sum:f32[]").until("attached")
		b.start(append(env, host...), "busy", b.socket, model).until("ok")
	}
}

func TestDeviceMemoryOutlivesTheWorkerThatAllocatedIt(t *testing.T) {
	b := deviceBed(t, "")
	first := b.worker("m", "DIE=1") // as soon as it has a batch
	waitForDescriptors(t, 1)
	c := b.start([]string{slowStream}, "client", b.socket, "m", "8", "stream")
	c.until("connected")
	_ = first.cmd.Wait()
	// It has less memory than the ring takes, but can map the ring's memory.
	second := b.worker("m", "STUB_CUDA_BYTES=0")
	c.until("torn 0, wrong 0, gone 0")
	c.until("ok")
	second.kill()
	waitForDescriptors(t, 0)
}

func TestDeviceMemoryIsFreedWithItsLastUser(t *testing.T) {
	b := deviceBed(t, "")
	w := b.worker("m")
	c := b.start([]string{"PAUSE=1"}, "client", b.socket, "m", "8", "stream")
	c.until("paused")
	waitForDescriptors(t, 1)
	w.kill() // the client keeps the model, and its memory
	if got := b.start(nil, "connect", b.socket, "m").until(""); got != "OK: " {
		t.Errorf("a client that comes while no worker is there: %s", got)
	}
	waitForDescriptors(t, 1)
	c.kill()
	waitForDescriptors(t, 0)
}

func TestARestartedBrokerGetsNewDeviceMemory(t *testing.T) {
	dir := t.TempDir()
	b := deviceBed(t, "")
	b.socket = filepath.Join(dir, "b.sock")
	serve := func() (stop func()) {
		br, err := broker.New(broker.Config{Socket: b.socket, OpenFolder: true, DrainTime: -1, Logger: quiet})
		must.Do(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); _ = br.Serve(ctx) }()
		return func() { cancel(); <-done }
	}
	stop := serve()
	w := b.worker("m")
	c := b.start([]string{"PAUSE=1", "WAIT=1"}, "client", b.socket, "m", "16", "stream")
	c.until("paused")
	stop()
	waitForDescriptors(t, 0) // closed in the background
	w.until("left 0")
	stop = serve()
	defer func() { stop() }()
	w.until("attached")
	fmt.Fprintln(c.stdin)
	c.until("torn 0, wrong 0")
	c.until("ok")
}

func TestEveryGPUErrorHasAName(t *testing.T) {
	b := deviceBed(t, "")
	ask := func(what, want string, env []string, args ...string) {
		t.Helper()
		got := b.start(env, append([]string{args[0], b.socket}, args[1:]...)...).until("")
		for _, part := range strings.Split(want, "…") {
			if !strings.Contains(got, part) {
				t.Errorf("%s: %s, want %s", what, got, want)
			}
		}
	}
	attach := func(what, want, signature string, more ...string) {
		t.Helper()
		ask(what, want, more, "attach", "other", signature)
	}
	const sig = "x:f32[4]@device:0 -> y:f32[4]"
	attach("a worker without a GPU", "NoGPU: ", sig, "STUB_CUDA_GPUS=")
	attach("a worker without a driver", "NoGPU: … cannot open shared object", sig, "RINGBATCH_LIBCUDA=/nowhere/libcuda.so.1")
	attach("a worker on a GPU that is not there", "WrongGPU: …device:7…sees 1", "x:f32[4]@device:7 -> y:f32[4]")
	attach("not enough device memory", "NoMemory: …2 MiB of device memory; 1 of 1 MiB are free", sig, "STUB_CUDA_BYTES=1048576")
	attach("tensors on two GPUs", "Invalid: …another GPU", "x:f32[4]@device:0 -> y:f32[4]@device:1")
	attach("no such memory", "Invalid: …device:N", "x:f32[4]@moon -> y:f32[4]")
	attach("a variable dimension", "Invalid: …variable", "x:f32[<=4]@device:0 -> y:f32[4]")
	ask("private slots", "Invalid: …private", nil, "attach", "other", sig, "private=true")
	waitForDescriptors(t, 0)

	b.worker("m")
	attachM := func(what, want, signature string) {
		t.Helper()
		ask(what, want, nil, "attach", "m", signature)
	}
	attachM("a worker with the tensors elsewhere", "SignatureMismatch: …@device:0", "x:f32[1024] -> y:f32[1024] sum:f32[]")
	ask("a client of another GPU", "WrongGPU: …GPU-61616161-…sees GPU-62626262-", []string{"STUB_CUDA_GPUS=b"}, "connect", "m")
	ask("a client that sees it as another number", "OK: ", []string{"STUB_CUDA_GPUS=ba"}, "connect", "m")
	ask("a client without a GPU", "NoGPU: ", []string{"STUB_CUDA_GPUS="}, "connect", "m")
	ask("a child of a process that has used CUDA", "NoGPU: …fork", nil, "fork", "m")
	ask("a client that cannot use device memory", "Invalid: …lies in device memory", []string{"HOST_ONLY=1"}, "connect", "m")
	if _, err := client.Dial(t.Context(), "m", client.WithSocket(b.socket)); !errors.Is(err, status.ErrInvalid) ||
		!strings.Contains(err.Error(), "device memory") {
		t.Errorf("a Go client: %v", err)
	}
	signature, err := tensor.ParseSignature([]string{"x:f32[1024]@device:0"}, []string{"y:f32[1024]@device:0", "sum:f32[]"})
	must.Do(t, err)
	if _, err := worker.Attach(t.Context(), worker.Config{Model: "m", Signature: signature, Socket: b.socket}); !errors.Is(err,
		status.ErrNoGPU) {
		t.Errorf("a Go worker without CUDA: %v", err)
	}
	waitForDescriptors(t, 1)
}

// liar offers another descriptor instead of device memory.
type liar struct{ fd int }

func (l *liar) Allocate(int64, int) (int, string, error) {
	fd, err := unix.Dup(l.fd)
	return fd, "GPU-61616161-6161-6161-6161-616161616161", err
}
func (l *liar) Import(int, int64, string) error { return nil }
func (l *liar) Synchronize()                    {}
func (l *liar) Close()                          {}

func TestADescriptorWithoutDeviceMemoryIsRefused(t *testing.T) {
	t.Parallel()
	b := deviceBed(t, "")
	signature, err := tensor.ParseSignature([]string{"x:f32[4]@device:0"}, []string{"y:f32[4]"})
	must.Do(t, err)
	memfd := func(name string, size int64) int {
		fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
		if err == nil {
			err = unix.Ftruncate(fd, size)
		}
		must.Do(t, err)
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	for what, fd := range map[string]int{"no-handle": memfd("else", 2<<20), "too-small": memfd("stub-cuda-a", 4096),
		"too-large": memfd("stub-cuda-a", 64<<20)} {
		w, err := worker.Attach(inside.WithDevice(t.Context(), &liar{fd}),
			worker.Config{Model: what, Signature: signature, Socket: b.socket})
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if got := b.start(nil, "connect", b.socket, what).until(""); !strings.HasPrefix(got, "Layout: ") {
			t.Errorf("%s: %s", what, got)
		}
		w.Close()
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must.Do(t, err)
	defer func() { _, _ = syscall.Close(pair[0]), syscall.Close(pair[1]) }()
	if _, err := worker.Attach(inside.WithDevice(t.Context(), &liar{pair[0]}),
		worker.Config{Model: "liar", Signature: signature, Socket: b.socket}); !errors.Is(err, status.ErrInvalid) {
		t.Errorf("a socket: %v", err)
	}
	b.worker("m") // others are served
	b.start(nil, "client", b.socket, "m", "4", "stream").until("torn 0, wrong 0, gone 0")
}

func TestASequenceHasStateInDeviceMemory(t *testing.T) {
	t.Parallel()
	b := deviceBed(t, "")
	b.start(nil, "state", b.socket, "m").until("ok")
}
