// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/internal/cputime"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

func TestSIGTERMLetsAcceptedRequestsFinishAndRefusesNewOnes(t *testing.T) {
	h := newHost(t, theModel)
	w := h.workerThat("patiently", theModel)
	c := h.dial()
	accepted := []asking{askLater(background(t), c, cmdSlow, 1)}
	w.expect("slow")
	accepted = append(accepted, askLater(background(t), c, cmdAnswer, 0))
	h.until("both are accepted", "m", func(m stats.Model) bool { return m.Requests == 2 })
	h.broker.Signal(syscall.SIGTERM)
	h.draining()
	askLater(background(t), c, cmdAnswer, 0).ends(t, status.ErrDraining)
	_, err := h.tryDial()
	must.Fail(t, "a new client of a draining broker", err, status.ErrDraining)
	w.Signal(syscall.SIGUSR1)
	for _, a := range accepted {
		a.ends(t, nil)
	}
	h.drained()
	c.Close()
}

// A service manager may end the workers together with the broker. The broker admits
// restarted workers, and no batch waits for others, even if a policy is set meanwhile.
func TestAWorkerThatComesDuringADrainFinishesWhatWasAcceptedAtOnce(t *testing.T) {
	m := theModel
	m.Wait = time.Hour
	h := newHost(t, m)
	c, other := h.dial(), h.dial() // a batch would wait for the other client
	accepted := askLater(background(t), c, cmdAnswer, 0)
	h.queued(1)
	h.broker.Signal(syscall.SIGTERM)
	h.draining()
	h.set("lease", "20m")
	h.newWorker(job{Model: m})
	accepted.ends(t, nil)
	h.drained()
	c.Close()
	other.Close()
}

func TestADrainGivesUpWaitingForAWorker(t *testing.T) {
	for _, c := range []struct {
		about        string
		drain, grace time.Duration
		want         error
	}{
		{"the drain's time is over", 200 * time.Millisecond, 10 * patience, status.ErrBrokerGone},
		{"no worker came within its grace", 10 * patience, 50 * time.Millisecond, status.ErrDraining},
	} {
		t.Run(c.about, func(t *testing.T) {
			h := idleHost(t, theModel)
			h.job.DrainTime, h.job.WorkerGrace = c.drain, c.grace
			h.startBroker()
			conn := h.dial()
			never := askLater(background(t), conn, cmdAnswer, 0)
			h.queued(1)
			h.stop()
			never.ends(t, c.want)
			conn.Close()
		})
	}
}

func TestABrokerIsRefusedASocketOnWhichSomebodyAnswers(t *testing.T) {
	h := newHost(t, theModel)
	h.launch().refused(status.ErrBrokerRunning)
	must.Do(t, os.Remove(h.socket+".lock")) // as a cleaner of old files would
	h.launch().refused(status.ErrBrokerRunning)
	w, c := h.worker(theModel), h.dial()
	works(t, c, 3) // the first was not disturbed
	c.Close()
	w.Kill()
	h.settled()
	h.stop()

	other, err := net.Listen("unix", h.socket)
	must.Do(t, err)
	defer other.Close()
	h.launch().refused(status.ErrBrokerRunning)
	_, err = net.Dial("unix", h.socket)
	must.Check(t, err) // the other program has its socket
}

// A cleaner of temporary files may remove socket and lock of a running broker.
func TestABrokerThatEndsLeavesTheSocketOfAnotherAlone(t *testing.T) {
	h := newHost(t, theModel)
	for _, f := range []string{h.socket, h.socket + ".lock"} {
		must.Do(t, os.Remove(f))
	}
	first := h.broker
	h.startBroker()
	first.Signal(syscall.SIGTERM)
	must.Check(t, first.end())
	h.worker(theModel).Kill()
	h.settled()
	h.stop()
}

func TestTheSocketOfAKilledBrokerIsTakenOver(t *testing.T) {
	h := newHost(t, theModel)
	h.broker.Kill()
	if _, err := os.Lstat(h.socket); err != nil {
		t.Fatalf("no stale socket to take over: %v", err)
	}
	_, err := h.tryDial()
	must.Fail(t, "dial to a stale socket", err, status.ErrNoBroker)
	// Exactly one of several brokers gets the socket.
	var all []*proc
	for range 5 {
		all = append(all, h.launch())
	}
	served := 0
	for _, p := range all {
		if err := p.Expect("ready", nil, patience); err == nil {
			served++
			h.broker = p
		} else if p.end() == nil {
			t.Errorf("a refused broker ended well: %v", err)
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
	h := idleHost(t)
	must.Do(t, os.WriteFile(h.socket, []byte("data"), 0o600))
	if err := h.launch().end(); err == nil {
		t.Error("a broker took a file for a stale socket")
	}
	if data, _ := os.ReadFile(h.socket); string(data) != "data" {
		t.Error("the file was changed")
	}
}

func TestOtherUsersAreRefusedUnlessListed(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to become somebody else")
	}
	const nobody = 65534
	h := idleHost(t, theModel)
	h.job.OpenFolder = true
	must.Do(t, os.Chmod(h.bed.Dir, 0o755))
	asNobody := func(role, do string) *proc {
		return h.start(testbed.Spec{Role: role, Job: job{Socket: h.socket, Model: theModel, Do: do}, UID: nobody})
	}

	h.startBroker()
	h.worker(theModel)
	asNobody("client", "read").refused(status.ErrForbidden, "uid 65534 is not on its list")
	h.stop()

	h.job.AllowedUIDs = []int{nobody}
	h.startBroker()
	h.worker(theModel)
	p := asNobody("client", "read")
	p.expect("read")
	board := asNobody("damage", "board")
	board.expect("mprotect refused")
	board.expect("open refused") // a read-only descriptor stays one
	board.expect("truncate refused")
	p.Kill()
	h.settled()
	h.stop()

	h.job.OpenFolder = false
	if err := h.launch().end(); err == nil {
		t.Error("a broker served in a folder that others may enter")
	}

	must.Do(t, os.Mkdir(h.bed.Path("private"), 0o700))
	h.socket = h.bed.Path("private/b.sock")
	h.job.Socket = h.socket
	h.startBroker()
	asNobody("client", "read").refused(status.ErrForbidden) // the folder decides, listed or not
	h.stop()
}

func TestAnIdleBrokerSleeps(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	c := h.dial()
	works(t, c, 10)
	h.eventually("it sleeps", func() error { // on a machine that stands still, CPU time is charged to any process
		before, err := cputime.Of(h.broker.Pid())
		if err != nil {
			return err
		}
		time.Sleep(500 * time.Millisecond)
		after, err := cputime.Of(h.broker.Pid())
		if err == nil && after-before > 100*time.Millisecond {
			err = fmt.Errorf("it used %v of CPU in half a second of nothing", after-before)
		}
		return err
	})
	c.Close()
	h.settled()
}

// A recording lasts as long as its caller asked for. Meanwhile the broker answers other
// calls; a recording whose caller has left ends.
func TestRecordingsHoldNobodyUpAndEndWithTheirCallers(t *testing.T) {
	var models []testbed.Model
	for i := range 10 { // more than are answered at a time
		m := theModel
		m.Name = fmt.Sprint("m", i)
		models = append(models, m)
	}
	h := newHost(t, models...)
	a := admin.New(h.socket)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var callers sync.WaitGroup
	for _, m := range models {
		callers.Go(func() {
			for ctx.Err() == nil { // the check below may record the model just now
				began := time.Now()
				if _, err := a.Trace(ctx, m.Name, time.Minute); err == nil && time.Since(began) < time.Minute {
					t.Errorf("%s: the recording ended while its caller waited", m.Name)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	for _, m := range models {
		h.eventually(m.Name+" is recorded", func() error {
			if _, err := a.Trace(t.Context(), m.Name, time.Millisecond); err == nil {
				return errors.New("no recording")
			}
			return nil
		})
	}
	h.stats()
	leave()
	callers.Wait()
	for _, m := range models {
		h.eventually("the recording of "+m.Name+" is over", func() error {
			_, err := a.Trace(t.Context(), m.Name, time.Millisecond)
			return err
		})
	}
	h.settled()
}
