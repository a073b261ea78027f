// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// dialUntilRefused dials until the broker refuses, and returns the reason.
func dialUntilRefused(h *host) (all []*client.Client, refused error) {
	h.t.Helper()
	for {
		c, err := h.tryDial(client.WithWindow(1))
		if err != nil {
			return all, err
		}
		all = append(all, c)
	}
}

func TestOneConnectionTooManyIsRefusedByNameAndTheOthersWorkOn(t *testing.T) {
	h := idleHost(t, theModel)
	h.job.MaxClients = 6
	h.startBroker()
	h.worker(theModel)
	all, err := dialUntilRefused(h)
	if !errors.Is(err, status.ErrTooManyConnections) || !strings.Contains(err.Error(), "max_clients is 6") {
		t.Errorf("after %d clients: %v", len(all), err)
	}
	if len(all) < 3 {
		t.Fatalf("only %d clients", len(all))
	}
	for _, c := range all {
		works(t, c, 2)
	}
	all[0].Close()
	h.eventually("there is room again", func() error {
		c, err := h.tryDial(client.WithWindow(1))
		if err == nil {
			works(t, c, 2)
			c.Close()
		}
		return err
	})
	for _, c := range all[1:] {
		c.Close()
	}
	h.settled()
}

func TestABrokerWhoseLogIsOnAFullDiskServes(t *testing.T) {
	h := idleHost(t, theModel)
	h.job.Log, h.job.Journal = "/dev/full", true
	h.startBroker()
	h.worker(theModel)
	c := h.dial()
	works(t, c, 20)
	c.Close()
	h.settled()
	h.stop()
}

// Clients take every descriptor, then connections that say nothing: the broker cannot
// even accept the next one.
func TestABrokerWithoutDescriptorsSaysSo(t *testing.T) {
	h := idleHost(t, theModel)
	h.limits.Descriptors = 60
	h.startBroker()
	h.worker(theModel)
	all, refused := dialUntilRefused(h)
	must.Fail(t, "a client too many", refused, status.ErrNoDescriptors)
	for _, c := range all {
		must.Do(t, c.Close())
	}
	var c *client.Client
	h.eventually("there is room again", func() (err error) { c, err = h.tryDial(client.WithWindow(1)); return err })
	var silent []net.Conn
	hangUp := func() {
		for _, s := range silent {
			s.Close()
		}
		silent = nil
	}
	defer hangUp()
	h.eventually("the next client is refused", func() error { // on a slow machine the broker may have hung up on the first
		for range 2 * h.limits.Descriptors {
			s, err := net.Dial("unix", h.socket)
			must.Do(t, err)
			silent = append(silent, s)
		}
		defer hangUp()
		next, err := h.tryDial()
		if err == nil {
			next.Close()
			return errors.New("there was room for it")
		}
		if !errors.Is(err, status.ErrNoDescriptors) {
			t.Errorf("the next client got: %v", err)
		}
		works(t, c, 2)
		return nil
	})
	h.eventually("there is room again", func() error {
		next, err := h.tryDial(client.WithWindow(1))
		if err == nil {
			works(t, next, 2)
			next.Close()
		}
		return err
	})
	c.Close()
	h.settled()
}

func TestAClientOutOfDescriptorsSaysThatItIsItsOwn(t *testing.T) {
	h := newHost(t, theModel)
	h.worker(theModel)
	refused, attached := 0, 0
	for limit := 8; limit <= 20; limit++ {
		p := h.start(testbed.Spec{Role: "client", Job: job{Socket: h.socket, Model: theModel, Do: "read"},
			Limits: testbed.Limits{Descriptors: limit}})
		switch err := p.Expect("read", nil, patience); {
		case err == nil:
			attached++
		case strings.Contains(err.Error(), status.ErrNoDescriptors.Error()+": it is this process"):
			refused++
		default:
			t.Errorf("with %d descriptors: %v", limit, err)
		}
		p.Kill()
	}
	if refused == 0 || attached == 0 {
		t.Errorf("%d clients were refused, %d attached: the limits are not around what a client needs", refused, attached)
	}
	h.settled()
}
