// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/alias"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// connect opens a connection that the test closes at its end.
func connect(t *testing.T, socket string) *net.UnixConn {
	t.Helper()
	c, err := attach.Dial(t.Context(), socket)
	must.Do(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func TestFramesThatNeverEndCostABoundedSumAndTheNextIsRefusedByName(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.dial()
	defer c.Close()
	before := usageOf(t, h.broker.Pid()).Peak
	var held []*net.UnixConn
	frame := binary.LittleEndian.AppendUint32(nil, control.MaxRequest)
	frame = append(frame, bytes.Repeat([]byte{0x90}, control.MaxRequest-1)...)
	for {
		conn := connect(t, h.socket)
		began := time.Now()
		_ = conn.SetWriteDeadline(began.Add(patience))
		_, sent := conn.Write(frame)
		var rep control.Reply
		_, err := control.Receive(conn, time.Now().Add(20*time.Millisecond), &rep)
		if errors.Is(err, os.ErrDeadlineExceeded) && sent == nil { // the broker waits for the rest
			held = append(held, conn)
			continue
		}
		if errors.Is(err, io.EOF) && time.Since(began) > time.Second { // this process stood still for too long
			continue
		}
		if err != nil || status.Code(rep.Code) != status.ErrQuota {
			t.Errorf("after %d frames: %d %q, %v", len(held), rep.Code, rep.Message, err)
		}
		break
	}
	if len(held) < 4 {
		t.Errorf("only %d frames", len(held))
	}
	for range 400 { // 100 MiB
		conn := connect(t, h.socket)
		_ = conn.SetWriteDeadline(time.Now().Add(50 * time.Millisecond)) // it may be refused before its last byte
		_, _ = conn.Write(frame)
	}
	more := usageOf(t, h.broker.Pid()).Peak - before
	if !testing.Short() && more > 64<<20 { // under the race detector memory has a shadow
		t.Errorf("the broker took %d MiB for frames that never ended", more>>20)
	}
	works(t, c, 5)
	other := h.dial() // the broker still reads short requests
	works(t, other, 5)
	other.Close()
}

func TestAUserMayDoWhatItWasAllowedAndIsToldHowToGetMore(t *testing.T) {
	h, other := strangers(t, theModel)
	tries := []struct {
		may      broker.Permissions
		name     string
		role, do string
		says     string // on success
	}{
		{broker.MayInfer, "infer", "client", "attach", "attach"},
		{broker.MayServe, "serve", "worker", "", ""},
		{broker.MayAdminister, "administer", "setter", "", "set"},
	}
	last := broker.MayInfer | broker.MayServe | broker.MayAdminister
	if testing.Short() {
		last = broker.MayServe
	}
	for may := broker.MayInfer; may <= last; may++ {
		h.job.AllowedUIDs, h.job.Grants = []int{0}, nil // root may infer, and no more
		for i, try := range tries {
			switch {
			case may == broker.MayInfer:
				h.job.AllowedUIDs = []int{0, other}
			case may&try.may != 0 && i%2 == 0:
				h.job.Grants = append(h.job.Grants, broker.Grant{UIDs: []int{other}, May: try.may})
			case may&try.may != 0:
				h.job.Grants = append(h.job.Grants, broker.Grant{GIDs: []int{other}, May: try.may})
			}
		}
		h.startBroker()
		for _, try := range tries {
			p := h.start(testbed.Spec{Role: try.role, Job: job{Socket: h.socket, Model: theModel, Do: try.do}, UID: other})
			switch {
			case may&try.may == 0:
				p.refused(status.ErrForbidden, "permission to "+try.name, fmt.Sprintf("--allow %d=%s", other, try.name))
			case try.role == "worker":
				p.running(h)
			default:
				p.expect(try.says)
			}
			p.Kill()
		}
		if err := admin.New(h.socket).Set(t.Context(), "m", policy.New(policy.Lease(time.Second))); !errors.Is(err, status.ErrForbidden) {
			t.Errorf("root, who may only infer, set a policy: %v", err)
		}
		h.stop()
	}
}

// running waits until the worker is attached.
func (p *proc) running(h *host) {
	p.t.Helper()
	h.eventually("it serves", func() error { _, err := h.workerStats("m", p); return err })
}

// playSetter sets a policy and an alias. If the broker refuses these, it must also
// refuse every other call that changes something or shows other users' requests.
func playSetter(c *testbed.Child, j job) error {
	a, model := admin.New(j.Socket), j.Model.Name
	err := a.Set(c.Context(), model, policy.New(policy.Lease(time.Minute)))
	named, bad := alias.Parse("a", model)
	changed := a.SetAlias(c.Context(), named, false)
	if err == nil && bad == nil && changed == nil {
		return c.Tell("set", nil)
	}
	_, traced := a.Trace(c.Context(), model, time.Millisecond)
	for what, other := range map[string]error{
		"alias": changed, "trace": traced, "restart": a.Restart(c.Context(), model), "scale": a.Scale(c.Context(), model, 1,
			false), "handover": a.HandOver(c.Context()),
	} {
		if !errors.Is(other, status.ErrForbidden) {
			return fmt.Errorf("set: %v, but %s: %v", err, what, other)
		}
	}
	return err
}

func TestOneProcessCannotTakeEveryConnection(t *testing.T) {
	h := idleHost(t, theModel)
	h.job.MaxClients = 100
	h.job.Limits.MaxProcessClients = 30
	h.startBroker()
	h.worker(theModel)
	all, err := dialUntilRefused(h)
	if !errors.Is(err, status.ErrTooManyConnections) || !strings.Contains(err.Error(), "max_process_clients is 30") || len(all) < 25 {
		t.Errorf("after %d connections: %v", len(all), err)
	}
	other := h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: theModel, Do: "attach", Window: 1}})
	other.expect("attach")
	if s := h.stats(); len(s.Models) != 1 {
		t.Error("an administrator, of the process that has too many, is not answered")
	}
	for _, c := range all {
		c.Close()
	}
}

func TestAUserIsRefusedByNameOnceItHasItsShare(t *testing.T) {
	h, other := strangers(t, theModel)
	h.job.MaxClients = 40
	h.job.Limits.UserShare = 50
	h.job.AllowedUIDs = []int{0}
	h.job.Grants = []broker.Grant{{UIDs: []int{other}, May: broker.MayInfer | broker.MayServe}}
	h.startBroker()
	p := h.start(testbed.Spec{Role: "worker", Job: job{Socket: h.socket, Model: theModel}, UID: other})
	p.running(h)
	var all []*client.Client
	var refused error
	h.eventually("it has its share", func() error { // connections of earlier statistics may be left
		more, err := dialUntilRefused(h)
		if all, refused = append(all, more...), err; len(all) < 20 {
			return fmt.Errorf("%d connections, then %w", len(all), err)
		}
		return nil
	})
	if !errors.Is(refused, status.ErrTooManyConnections) || !strings.Contains(refused.Error(), "user_share is 50") || len(all) != 20 {
		t.Errorf("after %d connections: %v", len(all), refused)
	}
	q := h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: theModel, Do: "attach"}, UID: other})
	q.expect("attach")
	q.Kill()
	for _, c := range all {
		c.Close()
	}
	// The share also limits the ring's slots.
	var c *client.Client
	h.eventually("they are gone", func() (err error) { c, err = h.tryDial(client.WithWindow(32)); return err })
	if _, err := h.tryDial(client.WithWindow(1)); !errors.Is(err, status.ErrQuota) || !strings.Contains(err.Error(), "user_share") {
		t.Errorf("more than half of the ring: %v", err)
	}
	q = h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: theModel, Do: "attach", Window: 16}, UID: other})
	q.expect("attach")
	q.Kill()
	c.Close()
}

func TestTheModelsThatAUsersWorkersDeclareAreLimitedByName(t *testing.T) {
	h := idleHost(t)
	h.job.Limits = broker.Limits{MaxUserModels: 3, MaxUserSlots: 200, MaxUserBytes: 100 << 10}
	h.startBroker()
	declare := func(name string, slots, width int) (*worker.Worker, error) {
		return worker.Attach(t.Context(), testbed.Model{Name: name, Slots: slots, MaxBatch: 1, Width: width}.WorkerConfig(h.socket))
	}
	keep := func(name string, slots int) *worker.Worker {
		t.Helper()
		w, err := declare(name, slots, 2)
		must.Do(t, err)
		t.Cleanup(w.Close)
		return w
	}
	first := keep("a", 10)
	keep("b", 10)
	for _, bad := range []struct {
		slots, width int
		says         string
	}{{190, 2, "max_user_slots is 200"}, {100, 1000, "max_user_bytes is 102400"}} {
		if _, err := declare("c", bad.slots, bad.width); !errors.Is(err, status.ErrQuota) || !strings.Contains(err.Error(), bad.says) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	keep("c", 10)
	if _, err := declare("d", 10, 2); !errors.Is(err, status.ErrQuota) || !strings.Contains(err.Error(), "max_user_models is 3") {
		t.Errorf("one model more: %v", err)
	}
	first.Close()
	h.eventually("there is room again", func() error {
		w, err := declare("d", 10, 2)
		if err == nil {
			w.Close()
		}
		return err
	})
}

// Names of peers end up in terminals.
func TestTheNamesOfPeersArePrintableAndShort(t *testing.T) {
	h := newHost(t, theModel)
	req := workerRequest("m", theModel.Signature())
	for _, name := range []string{strings.Repeat("long", 16_000), "\x1b[2J\x1b[1;1HFORGED\x1b]0;title\x07", "worker\nFORGED: fine\r\n",
		"\u202eFORGED\u2066\u200b\ufeff", "\xff\xfe\x80\x00\x7f\u0085FORGED", strings.Repeat("é", 5_000)} {
		req.Name, req.Worker.GPU = name, name
		s, err := attach.Open(t.Context(), h.socket, req)
		must.Do(t, err)
		for _, w := range h.model("m").Workers {
			for _, text := range []string{w.Name, w.GPU} {
				bad := strings.IndexFunc(text, func(c rune) bool { return !unicode.IsPrint(c) })
				if bad >= 0 || !utf8.ValidString(text) || len(text) == 0 || len(text) > tensor.MaxNameBytes {
					t.Errorf("%.40q is shown as %q", name, text)
				}
			}
		}
		s.HangUp()
		s.Close()
		h.until("it has left", "m", func(m stats.Model) bool { return len(m.Workers) == 0 })
	}
	h.settled()
}

func TestRepliesLongerThanAFrameArriveWhole(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("megabytes of JSON, which the race detector has nothing to find in")
	}
	sizes := make([]uint32, 4096)
	for i := range sizes {
		sizes[i] = 1 << 20
		sizes[i] += uint32(i)
	}
	sig := tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.U8, Shape: []int{int(sizes[len(sizes)-1])}, Variable: []int{0}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.U8, Shape: []int{1}}},
	}
	var cfg broker.Config
	const models = 250
	for i := range models {
		p := policy.New(policy.Slots(1), policy.MaxBatchSize(1))
		if i < 50 {
			p = policy.New(policy.Buckets("x", 0, sizes...)).Over(p)
		}
		cfg.Models = append(cfg.Models, broker.ModelConfig{Name: fmt.Sprint("m", i), Signature: sig, Policy: p})
	}
	a := admin.New(ringbatchtest.Start(t, cfg).Socket())
	list, err := a.Models(t.Context())
	if err != nil || len(list) != models || len(list[0].Policy["buckets.x.0"]) < 30_000 {
		t.Errorf("%d models, %v", len(list), err)
	}
	raw, err := a.StatsJSON(t.Context())
	must.Do(t, err)
	s, err := a.Stats(t.Context())
	if err != nil || len(s.Models) != models {
		t.Errorf("statistics of %d bytes: %v", len(raw), err)
	}
	if len(raw) < control.MaxFrame/4 {
		t.Errorf("statistics of %d bytes come in one frame", len(raw))
	}
}

func TestASystemCallThatIsRefusedIsDoneWithoutOrNamed(t *testing.T) {
	const soPeerPidfd = 77
	noPidfd := testbed.Denial{Call: unix.SYS_PIDFD_OPEN, Errno: unix.EPERM}
	noPeerPidfd := testbed.Denial{Call: unix.SYS_GETSOCKOPT, Option: soPeerPidfd, Errno: unix.ENOPROTOOPT}
	for _, c := range []struct {
		about   string
		deny    []testbed.Denial
		refuses string
	}{
		{"no epoll_pwait2 by seccomp", []testbed.Denial{{Call: unix.SYS_EPOLL_PWAIT2, Errno: unix.EPERM}}, ""},
		{"no epoll_pwait2 by the kernel", []testbed.Denial{{Call: unix.SYS_EPOLL_PWAIT2, Errno: unix.ENOSYS}}, ""},
		{"no pidfd_open, but the socket gives pidfds", []testbed.Denial{noPidfd}, ""},
		{"a kernel whose sockets give no pidfds", []testbed.Denial{noPeerPidfd}, ""},
		{"no pidfds at all by seccomp", []testbed.Denial{noPidfd, noPeerPidfd}, "pidfd_open"},
		{"no pidfds at all by the kernel", []testbed.Denial{{Call: unix.SYS_PIDFD_OPEN, Errno: unix.ENOSYS}, noPeerPidfd}, "pidfd_open"},
		{"no pidfd_send_signal", []testbed.Denial{{Call: unix.SYS_PIDFD_SEND_SIGNAL, Errno: unix.EPERM}}, "pidfd_send_signal"},
	} {
		t.Run(c.about, func(t *testing.T) {
			h := idleHost(t, theModel)
			h.limits.Deny = c.deny
			if c.refuses != "" {
				h.launch().refused(status.ErrInvalid, c.refuses, "seccomp")
				return
			}
			h.startBroker()
			first := h.workerThat("patiently", theModel)
			c := h.dial()
			slow := askLater(background(t), c, cmdSlow, 1)
			first.expect("slow")
			h.worker(theModel)
			first.Kill() // its death is noticed
			slow.ends(t, nil)
			works(t, c, 5)
			c.Close()
			h.settled()
		})
	}
}

func TestAPeerOfAnotherTimeNamespaceIsRefusedByName(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make a namespace")
	}
	h := newHost(t, theModel)
	for _, offset := range []string{"100000", "-1"} {
		for _, role := range []string{"client", "worker"} {
			p := h.start(testbed.Spec{Role: role, Job: job{Socket: h.socket, Model: theModel, Do: "attach"},
				Wrap: []string{"unshare", "--time", "--monotonic", offset, "--fork", "--kill-child=SIGKILL"}})
			p.refused(status.ErrNamespace, "time namespaces")
		}
	}
	h.settled()
}

// First tries of a client in another language.
func TestAControlFrameOfOtherTypesIsRefusedWithAReason(t *testing.T) {
	h := newHost(t, theModel)
	for what, body := range map[string]string{
		"no map":             "\x01",
		"a list":             "\x91\x02",
		"a text as a number": "\x82\xa7version" + string(rune(control.Version)) + "\xa6window\xa216",
		"a float as version": "\x81\xa7version\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00",
		// internal/control bounds the memory
		"nested maps": "\x81\xa4what" + strings.Repeat("\x81\x01", control.MaxRequest/2-4) + "\xc0",
	} {
		rep, err := sendRaw(h, body)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if status.Code(rep.Code) != status.ErrProtocol || !strings.Contains(rep.Message, control.ErrFrame.Error()) {
			t.Errorf("%s: %d %q", what, rep.Code, rep.Message)
		}
	}
	h.settled()
}

// sendRaw sends a frame with any body and returns the broker's reply.
func sendRaw(h *host, body string) (rep control.Reply, err error) {
	conn, err := attach.Dial(h.t.Context(), h.socket)
	if err != nil {
		return rep, err
	}
	defer conn.Close()
	_ = conn.SetWriteDeadline(time.Now().Add(patience))
	frame := binary.LittleEndian.AppendUint32(nil, uint32(len(body)))
	if _, err := conn.Write(append(frame, body...)); err != nil {
		return rep, err
	}
	_, err = control.Receive(conn, time.Now().Add(patience), &rep)
	return rep, err
}
