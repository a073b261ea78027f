package e2e

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
)

func TestABrokerKilledUnderLoadIsFoundAgainByItsPeers(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	h.worker(theModel)
	c := h.dial(client.WithWindow(24))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var fine, gone atomic.Int64
	for range 24 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				select {
				case <-stop:
					return
				default:
				}
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				err := ask(ctx, c, cmdAnswer, 0, 1)
				cancel()
				switch {
				case err == nil:
					fine.Add(1)
				case errors.Is(err, client.ErrBrokerGone):
					gone.Add(1)
				default:
					t.Errorf("request ended with %v", err)
					return
				}
			}
		}()
	}
	for range 3 {
		seen := fine.Load()
		h.eventually("requests are answered", func() error {
			if fine.Load() < seen+200 {
				return errors.New("no progress")
			}
			return nil
		})
		h.broker.kill()
		h.startBroker() // on the socket that the dead one left
		h.eventually("all are back", func() error {
			if m := h.model("m"); len(m.Workers) != 2 || m.Clients != 1 {
				return errors.New("not yet")
			}
			return nil
		})
	}
	works(t, c, 5)
	close(stop)
	h.wait(&wg)
	c.Close()
	h.before = usage{fds: h.before.fds, maps: 2, threads: h.before.threads}
	h.settled()
	if gone.Load() == 0 {
		t.Error("no request noticed that the broker was killed three times")
	}
}

func TestRequestsOfADeadBrokerEndWithBrokerGone(t *testing.T) {
	h := newHost(t, theModel) // no worker
	c := h.dial()
	var all []asking
	for range 8 {
		all = append(all, askLater(background(t), c, cmdAnswer, 0))
	}
	h.queued(8)
	h.broker.kill()
	for _, a := range all {
		a.ends(t, client.ErrBrokerGone)
	}
	if _, err := c.TryClaim(1); !errors.Is(err, client.ErrBrokerGone) {
		t.Errorf("TryClaim without a broker: %v", err)
	}
	c.Close()
}

func TestSIGTERMLetsAcceptedRequestsFinishAndRefusesNewOnes(t *testing.T) {
	h := newHost(t, theModel)
	w := h.workerThat("patiently", theModel)
	c := h.dial()
	accepted := []asking{askLater(background(t), c, cmdSlow, 1)}
	w.expect("slow")
	accepted = append(accepted, askLater(background(t), c, cmdAnswer, 0))
	h.eventually("both are accepted", func() error {
		if h.model("m").Requests != 2 {
			return errors.New("not yet")
		}
		return nil
	})
	h.broker.signal(syscall.SIGTERM)
	h.draining()
	askLater(background(t), c, cmdAnswer, 0).ends(t, client.ErrDraining)
	if _, err := h.tryDial(); !errors.Is(err, client.ErrDraining) {
		t.Errorf("a new client of a draining broker: %v", err)
	}
	w.signal(syscall.SIGUSR1)
	for _, a := range accepted {
		a.ends(t, nil)
	}
	h.broker.expect("drained")
	if err := h.broker.wait(); err != nil {
		t.Errorf("broker: %v", err)
	}
	c.Close()
}

// draining waits until the broker says so.
func (h *host) draining() {
	h.t.Helper()
	h.eventually("it is draining", func() error {
		if !h.stats().Draining {
			return errors.New("not yet")
		}
		return nil
	})
}

// A service manager that signals a whole group ends the workers together with
// the broker; whoever starts them again must be let in.
func TestAWorkerThatComesDuringADrainFinishesWhatWasAccepted(t *testing.T) {
	h := newHost(t, theModel)
	c := h.dial()
	accepted := askLater(background(t), c, cmdAnswer, 0)
	h.queued(1)
	h.broker.signal(syscall.SIGTERM)
	h.draining()
	start(t, role{Kind: "worker", Socket: h.role.Socket, Model: theModel})
	accepted.ends(t, nil)
	h.broker.expect("drained")
	if err := h.broker.wait(); err != nil {
		t.Errorf("broker: %v", err)
	}
	c.Close()
}

func TestADrainDoesNotWaitForCompany(t *testing.T) {
	m := theModel
	m.WaitMS = 60_000
	h := newHost(t, m)
	h.worker(m)
	c, other := h.dial(), h.dial() // who could join, and does not
	a := askLater(context.Background(), c, cmdAnswer, 0)
	h.queued(1)
	h.broker.signal(syscall.SIGTERM)
	a.ends(t, nil)
	h.broker.expect("drained")
	c.Close()
	other.Close()
}

func TestAPolicyThatIsSetDuringADrainDoesNotMakeItWait(t *testing.T) {
	m := theModel
	m.WaitMS = 60_000
	h := newHost(t, m)
	c, other := h.dial(), h.dial()
	a := askLater(context.Background(), c, cmdAnswer, 0)
	h.queued(1)
	h.broker.signal(syscall.SIGTERM)
	h.draining()
	if err := admin.New(h.role.Socket).Set(t.Context(), m.Name, map[string]string{"lease": "20s"}); err != nil {
		t.Fatal(err)
	}
	start(t, role{Kind: "worker", Socket: h.role.Socket, Model: m})
	a.ends(t, nil)
	h.broker.expect("drained")
	c.Close()
	other.Close()
}

func TestADrainEndsWhenItsTimeIsOver(t *testing.T) {
	h := newHost(t, theModel)
	h.broker.kill()
	h.role.DrainMS = 200
	h.startBroker()
	c := h.dial()
	never := askLater(background(t), c, cmdAnswer, 0) // no worker will come
	h.queued(1)
	h.stop()
	never.ends(t, client.ErrBrokerGone)
	c.Close()
}

func TestASecondBrokerOnTheSameSocketIsRefused(t *testing.T) {
	h := newHost(t, theModel)
	if _, err := broker.New(broker.Config{Socket: h.role.Socket}); !errors.Is(err, status.ErrBrokerRunning) {
		t.Errorf("a second broker: %v", err)
	}
	second := start(t, h.role)
	if err := second.wait(); err == nil {
		t.Error("a second broker served")
	}
	w, c := h.worker(theModel), h.dial()
	works(t, c, 3) // the first was not disturbed
	c.Close()
	w.kill()
	h.settled()
	h.stop()
}

// A cleaner of temporary files may take socket and lock from a running broker.
func TestABrokerThatEndsLeavesTheSocketOfAnotherAlone(t *testing.T) {
	h := newHost(t, theModel)
	for _, f := range []string{h.role.Socket, h.role.Socket + ".lock"} {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	first := h.broker
	h.startBroker()
	first.signal(syscall.SIGTERM)
	if err := first.wait(); err != nil {
		t.Errorf("the first broker: %v", err)
	}
	h.worker(theModel).kill()
	h.settled()
	h.stop()
}

func TestTheSocketOfAKilledBrokerIsTakenOver(t *testing.T) {
	h := newHost(t, theModel)
	h.broker.kill()
	if _, err := os.Lstat(h.role.Socket); err != nil {
		t.Fatalf("no stale socket to take over: %v", err)
	}
	if _, err := h.tryDial(); !errors.Is(err, client.ErrNoBroker) {
		t.Errorf("dial to a stale socket: %v", err)
	}
	// Of many that try at once, exactly one gets it.
	var all []*proc
	for range 5 {
		all = append(all, start(t, h.role))
	}
	served := 0
	for _, p := range all {
		line := <-p.lines
		if line == "listening" {
			served++
			h.broker = p
		} else if p.wait() == nil {
			t.Errorf("a refused broker ended well: %s", line)
		}
	}
	if served != 1 {
		t.Fatalf("%d brokers serve one socket", served)
	}
	h.worker(theModel)
	c := h.dial()
	works(t, c, 3)
	c.Close()
	h.stop()
}

func TestAFileThatIsNoSocketIsNotTouched(t *testing.T) {
	dir, err := os.MkdirTemp("", "rb")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "precious")
	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := broker.New(broker.Config{Socket: path}); err == nil {
		t.Error("a broker took a file for a stale socket")
	}
	if data, _ := os.ReadFile(path); string(data) != "data" {
		t.Error("the file was changed")
	}
}

func TestASocketOnWhichSomebodyAnswersIsNotTakenOver(t *testing.T) {
	h := newHost(t, theModel)
	if err := os.Remove(h.role.Socket + ".lock"); err != nil { // as a cleaner of old files would
		t.Fatal(err)
	}
	if _, err := broker.New(broker.Config{Socket: h.role.Socket}); !errors.Is(err, status.ErrBrokerRunning) {
		t.Errorf("a second broker: %v", err)
	}
	w, c := h.worker(theModel), h.dial()
	works(t, c, 3) // the first was not disturbed
	c.Close()
	w.kill()
	h.settled()
	h.stop()

	other, err := net.Listen("unix", h.role.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if _, err := broker.New(broker.Config{Socket: h.role.Socket}); !errors.Is(err, status.ErrBrokerRunning) {
		t.Errorf("a broker on another program's socket: %v", err)
	}
	if _, err := net.Dial("unix", h.role.Socket); err != nil {
		t.Errorf("the other program lost its socket: %v", err)
	}
}

func TestOtherUsersAreRefusedUnlessListed(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to become somebody else")
	}
	const nobody = 65534
	h := newHost(t, theModel)
	h.broker.kill()
	h.role.OpenFolder = true
	if err := os.Chmod(h.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(h.dir, "e2e") // where others may run it
	copyFile(t, exe, os.Args[0])
	asNobody := func(c *exec.Cmd) {
		c.Path, c.Dir = exe, "/"
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	other := role{Kind: "client", Socket: h.role.Socket, Model: theModel, Do: "read"}

	h.startBroker()
	h.worker(theModel)
	p := start(t, other, asNobody)
	if line := <-p.lines; line != "error: dial m: "+client.ErrForbidden.Error()+": uid 65534 is not on its list" {
		t.Errorf("uid %d was told %q", nobody, line)
	}
	h.stop()

	h.role.AllowedUIDs = []int{nobody}
	h.startBroker()
	h.worker(theModel)
	p = start(t, other, asNobody)
	p.expect("read")
	board := start(t, role{Kind: "damage", Do: "board", Socket: h.role.Socket, Model: theModel}, asNobody)
	board.expect("mprotect refused")
	board.expect("open refused") // a read-only descriptor stays one
	board.expect("truncate refused")
	p.kill()
	h.settled()
	h.stop()

	h.role.OpenFolder = false
	refused := start(t, h.role)
	if err := refused.wait(); err == nil {
		t.Error("a broker served in a folder that others may enter")
	}
}

func copyFile(t *testing.T, to, from string) {
	t.Helper()
	src, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(dst, src)
	if err := errors.Join(err, dst.Close()); err != nil {
		t.Fatal(err)
	}
}

func TestAnIdleBrokerSleeps(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.dial()
	works(t, c, 10)
	before := cpuTime(t, h.broker.pid())
	time.Sleep(500 * time.Millisecond)
	if used := cpuTime(t, h.broker.pid()) - before; used > 100*time.Millisecond {
		t.Errorf("used %v of CPU in half a second of nothing", used)
	}
	c.Close()
	h.settled()
}
