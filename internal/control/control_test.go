// SPDX-License-Identifier: Apache-2.0

package control

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/internal/must"
)

func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must.Do(t, err)
	conn := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "pair")
		defer f.Close()
		c, err := net.FileConn(f)
		must.Do(t, err)
		t.Cleanup(func() { c.Close() })
		return c.(*net.UnixConn)
	}
	return conn(fds[0]), conn(fds[1])
}

func soon() time.Time { return time.Now().Add(time.Minute) }

func TestAFrameArrivesAsItWasSentWithItsDescriptors(t *testing.T) {
	a, b := pair(t)
	sent := Request{Version: Version, Op: OpWorker, Model: "m", Name: "n", Window: 3,
		Worker: &WorkerInfo{Inputs: []string{"x:f32[4]"}, Outputs: []string{"y:f32[2]"}, Depth: 2, PadTo: 8, Pad: "fixed"},
		Policy: map[string]string{"k": strings.Repeat("v", 100_000)}}
	r, w, err := os.Pipe()
	must.Do(t, err)
	defer r.Close()
	go func() {
		must.Check(t, Send(a, soon(), &sent, int(w.Fd())))
		w.Close()
	}()
	var got Request
	fds, err := Receive(b, soon(), &got)
	if err != nil || len(fds) != 1 {
		t.Fatalf("%v, descriptors %v", err, fds)
	}
	if !reflect.DeepEqual(sent, got) {
		t.Errorf("sent %+v, got %+v", sent, got)
	}
	_, _ = unix.Write(fds[0], []byte("through"))
	CloseFDs(fds)
	if text, _ := io.ReadAll(r); string(text) != "through" {
		t.Errorf("read %q from the other end", text)
	}
}

type noLimit struct{}

func (noLimit) Take(int) bool { return true }
func (noLimit) Give(int)      {}

// A descriptor is received where it was looked for, one at most, and none is left open.
func TestADescriptorIsTakenOnlyAfterARequestThatAnnouncesIt(t *testing.T) {
	for _, c := range []struct {
		with, after int // descriptors with the request, and with the byte after it
		looked      bool
		want        bool
	}{{}, {with: 1}, {with: 1, after: 1}, {after: 1, looked: true, want: true}, {after: 3, looked: true, want: true}, {with: 2, after: 1,
		looked: true, want: true}, {with: 1, looked: true}} {
		a, b := pair(t)
		r, w, err := os.Pipe()
		must.Do(t, err)
		must.Do(t, Send(a, soon(), &Request{Op: OpWorker, GPU: "GPU-1"}, slices.Repeat([]int{int(w.Fd())}, c.with)...))
		if c.after == 1 {
			err = SendOffer(a, soon(), int(w.Fd()))
		} else {
			_, _, err = a.WriteMsgUnix([]byte{0}, unix.UnixRights(slices.Repeat([]int{int(w.Fd())}, c.after)...), nil)
		}
		must.Do(t, err)
		w.Close()
		a.Close()
		var got Request
		if err := ReceiveRequest(b, soon(), noLimit{}, &got); err != nil || got.GPU != "GPU-1" {
			t.Errorf("%+v: %v, %v", c, got, err)
		}
		if c.looked {
			fd, err := ReceiveOffer(b, soon())
			if (fd >= 0) != c.want || (err == nil) != c.want {
				t.Errorf("%+v: descriptor %d, %v", c, fd, err)
			}
			CloseFDs([]int{fd})
		}
		b.Close()
		_ = r.SetReadDeadline(soon())
		if text, err := io.ReadAll(r); err != nil || len(text) > 0 { // EOF comes when the other end is closed everywhere
			t.Errorf("%+v: %q, %v", c, text, err)
		}
		r.Close()
	}
}

func TestHalfAFrameIsAnErrorNotAWaitForEver(t *testing.T) {
	whole := func() []byte {
		body, _ := msgpack.Marshal(&Request{Op: OpPing})
		return append(binary.LittleEndian.AppendUint32(nil, uint32(len(body))), body...)
	}()
	for n := range len(whole) {
		a, b := pair(t)
		_, _ = a.Write(whole[:n])
		a.Close()
		var req Request
		if _, err := Receive(b, soon(), &req); err == nil {
			t.Errorf("%d of %d bytes were taken for a frame", n, len(whole))
		}
	}
	a, b := pair(t)
	_, _ = a.Write(whole[:3])
	var req Request
	if _, err := Receive(b, time.Now().Add(20*time.Millisecond), &req); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a peer that stops in the middle: %v", err)
	}
}

func TestALengthOutsideTheLimitsIsNotBelieved(t *testing.T) {
	for _, size := range []uint32{0, MaxFrame + 1, 1 << 31, ^uint32(0)} {
		a, b := pair(t)
		_, _ = a.Write(binary.LittleEndian.AppendUint32(nil, size))
		var req Request
		if _, err := Receive(b, soon(), &req); !errors.Is(err, ErrFrame) {
			t.Errorf("a frame of %d bytes: %v", size, err)
		}
	}
	a, _ := pair(t)
	must.Fail(t, "sending too much", Send(a, soon(), &Request{Name: strings.Repeat("x", MaxFrame)}), ErrFrame)
}

func TestMoreDescriptorsThanAllowedAreRefusedAndClosed(t *testing.T) {
	a, b := pair(t)
	r, w, err := os.Pipe()
	must.Do(t, err)
	defer r.Close()
	fds := make([]int, 40)
	for i := range fds {
		fds[i] = int(w.Fd())
	}
	before := openFDs(t)
	must.Do(t, Send(a, soon(), &Request{Op: OpPing}, fds...))
	var req Request
	got, err := Receive(b, soon(), &req)
	if !errors.Is(err, ErrFrame) {
		t.Errorf("40 descriptors: %v", err)
	}
	CloseFDs(got)
	if after := openFDs(t); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
	w.Close()
}

func openFDs(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	must.Do(t, err)
	return len(list)
}

func TestADeeplyNestedMessageIsAnErrorNotACrash(t *testing.T) {
	for _, nest := range []byte{0x91, 0x81} {
		body := make([]byte, MaxFrame)
		for i := range body {
			body[i] = nest
		}
		if err := Decode(body, &Request{}); err == nil {
			t.Error("it was decoded")
		}
		// The same as the value of an unknown field.
		head, _ := msgpack.Marshal("unknown")
		if err := Decode(append(append([]byte{0x81}, head...), body...), &Request{}); err == nil {
			t.Error("it was skipped")
		}
	}
}

func TestTheSocketIsGivenOrNamedOrInTheRuntimeFolder(t *testing.T) {
	t.Setenv(SocketEnv, "/named")
	t.Setenv("XDG_RUNTIME_DIR", "/run/user/7")
	if p := SocketPath("/given"); p != "/given" {
		t.Error(p)
	}
	if p := SocketPath(""); p != "/named" {
		t.Error(p)
	}
	t.Setenv(SocketEnv, "")
	if p := SocketPath(""); p != "/run/user/7/ringbatch/broker.sock" {
		t.Error(p)
	}
	t.Setenv("XDG_RUNTIME_DIR", "")
	if p := SocketPath(""); filepath.Base(p) != "broker.sock" || !strings.HasPrefix(p, os.TempDir()) {
		t.Error(p)
	}
}

func FuzzDecode(f *testing.F) {
	for _, msg := range []any{
		&Request{Version: Version, Op: OpClient, Model: "m", Window: 8},
		&Request{Version: Version, Op: OpWorker, Worker: &WorkerInfo{Inputs: []string{"x:f32[4]"}},
			Policy: map[string]string{"buckets.x.0": "1"}},
		&Request{Op: OpSet, Policy: map[string]string{"a": "b"}},
		&Reply{Code: 3, Message: "no", Attached: &Attached{Model: "m", Inputs: []string{"x:f32[4]"}}, Models: []Model{{Name: "m"}}},
	} {
		body, err := msgpack.Marshal(msg)
		must.Do(f, err)
		f.Add(body)
	}
	f.Add([]byte{0x81, 0xa1, 'x', 0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte("\x81\xa6policy\x81\xa6levels\xdd\xff\xff\xff\xff"))
	f.Add([]byte("\x81\xa4what" + strings.Repeat("\x91", maxDepth+1) + "\xc0"))
	f.Add([]byte("\x81\xa6policy\x81\xa6levels\xdd\x00\x01\x00\x00" + strings.Repeat("\xc0", 1<<16)))
	f.Fuzz(func(_ *testing.T, body []byte) {
		// Whatever comes, an error at most.
		_ = Decode(body, &Request{})
		_ = Decode(body, &Reply{})
	})
}

// Each of these made the decoder ask for memory by the gigabyte.
func TestAFewBytesCannotAskForMuchMemory(t *testing.T) {
	huge := "\xff\xff\xff\xff"
	for what, body := range map[string]string{
		"policy":    "\x81\xa6policy\xdf" + huge,
		"inputs":    "\x81\xa6worker\x81\xa6inputs\xdd" + huge,
		"model":     "\x81\xa5model\xdb" + huge,
		"stats":     "\x81\xa5stats\xc6" + huge,
		"models":    "\x81\xa6models\xdd" + huge,
		"depth":     "\x81\xa4what" + strings.Repeat("\x91", 1<<19) + "\xc0",
		"cut short": "\x82\xa5model",
		"no value":  "\xc1",
		"more":      "\x80\x80",
	} {
		got := allocated(func() {
			for _, msg := range []any{&Request{}, &Reply{}} {
				if err := Decode([]byte(body), msg); !errors.Is(err, ErrFrame) {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
		if got > 2<<20 {
			t.Errorf("%s: %d bytes of memory", what, got)
		}
	}
}

// wide is a message whose arrays are as long as a frame allows: each value
// takes one byte there, and up to 80 once it is decoded.
func wide(before, value string) string {
	n := (MaxRequest - len(before) - 5) / len(value)
	return before + "\xdd" + string(binary.BigEndian.AppendUint32(nil, uint32(n))) + strings.Repeat(value, n)
}

var wideRequests = map[string]string{
	"inputs":  wide("\x81\xa6worker\x81\xa6inputs", "\xa0"),
	"unknown": wide("\x81\xa4what", "\x90"),
}

func TestAFullFrameCannotAskForMuchMemory(t *testing.T) {
	for what, body := range wideRequests {
		err := Decode([]byte(body), &Request{})
		if !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), "values") {
			t.Errorf("%s: %v", what, err)
		}
		if got := allocated(func() { _ = Decode([]byte(body), &Request{}) }); got > 2<<20 {
			t.Errorf("%s: %d bytes of memory", what, got)
		}
	}
}

func TestARequestWithManyValuesIsRead(t *testing.T) {
	r := Request{Op: OpWorker, Policy: map[string]string{}}
	for i := range 4_000 {
		r.Policy[strconv.Itoa(i)] = "1"
	}
	body, err := msgpack.Marshal(&r)
	must.Do(t, err)
	must.Check(t, Decode(body, &Request{}))
}

func TestALongListOfModelsIsRead(t *testing.T) {
	models := make([]Model, 10_000)
	body, err := msgpack.Marshal(&Reply{Models: models})
	must.Do(t, err)
	if len(body) > MaxFrame {
		t.Fatalf("%d bytes", len(body))
	}
	var got Reply
	if err := Decode(body, &got); err != nil || len(got.Models) != len(models) {
		t.Errorf("%d models, %v", len(got.Models), err)
	}
}

func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

func TestAFallbackFolderOfSomebodyElseIsNotTrusted(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	t.Setenv("XDG_RUNTIME_DIR", "")
	t.Setenv(SocketEnv, "")
	path := SocketPath("")
	dir := filepath.Dir(path)
	if filepath.Dir(dir) != tmp {
		t.Fatalf("the fallback is %s", path)
	}
	ok := func(what, path string) {
		t.Helper()
		if err := CheckFolder(path); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused := func(what string) {
		t.Helper()
		if CheckFolder(path) == nil {
			t.Errorf("%s is trusted", what)
		}
	}
	ok("no folder yet", path)
	must.Do(t, os.Symlink(tmp, dir))
	refused("a link to somewhere else")
	_ = os.Remove(dir)
	must.Do(t, os.Mkdir(dir, 0o700))
	ok("its own folder", path)
	if os.Getuid() == 0 {
		must.Do(t, os.Chown(dir, 12345, 12345))
		refused("a folder of another user")
	}
	ok("a folder that was chosen", "/run/somebody/broker.sock")
}
