// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/internal/testlog"
)

// connectFrom is connect from another address of this host.
func (r *rig) connectFrom(address string) net.Conn {
	r.t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	c, err := d.DialContext(soon(r.t), "tcp", strings.TrimPrefix(r.http, "http://"))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	return c
}

// knows waits until so many connections of a door are as they should be.
func (r *rig) knows(door int, want int, are func(*conn) bool) {
	r.t.Helper()
	r.eventually("the connections are known", func() error {
		l := r.g.doors[door]
		l.mu.Lock()
		defer l.mu.Unlock()
		n := 0
		for c := range l.conns {
			if are(c) {
				n++
			}
		}
		if n != want {
			return fmt.Errorf("%d of %d", n, want)
		}
		return nil
	})
}

func TestOneAddressLeavesRoomForOthers(t *testing.T) {
	m := doubler(t)
	var log testlog.Log
	r := newRig(t, func(c *Config) {
		c.MaxConnections, c.CallerConnections = 16, 14
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	}, m)
	_, release := r.holds(m)
	defer release()
	answered := make(chan error, 14)
	for range cap(answered) {
		c := r.connect()
		go func() { answered <- r.ask(c, plainDouble()) }()
	}
	r.underWay(14)
	if err := r.ask(r.connect(), askLive); err == nil {
		t.Error("one address has more than its part")
	}
	if text, _ := io.ReadAll(r.connect()); len(text) > 0 && !strings.Contains(string(text), "--caller_connections") {
		t.Errorf("it is told %s", text)
	}
	if !strings.Contains(log.String(), "--caller_connections") {
		t.Errorf("logged: %s", log.String())
	}
	other := r.connectFrom("127.0.0.2")
	if err := r.ask(other, askLive); err != nil {
		t.Errorf("another address: %v", err)
	}
	r.isIdle(other)
	if err := r.ask(r.connect(), askLive); err == nil {
		t.Error("the crowd took the place of another's connection")
	}
	release()
	for range cap(answered) {
		if err := <-answered; err != nil {
			t.Error(err)
		}
	}
	r.eventually("it has room again", func() error { return r.ask(r.connect(), askLive) })
	r.hangUp()
}

func TestCallersThatHaveToHaveOneAddressMayHaveEveryConnection(t *testing.T) {
	for _, k := range []struct {
		door        string
		given, want int
	}{
		{"127.0.0.1", 0, 16}, {"::1", 0, 16}, {"127.0.0.1", 5, 5},
		{"0.0.0.0", 0, 14}, {"::", 0, 14}, {"10.1.2.3", 0, 14}, {"10.1.2.3", 16, 16},
	} {
		c := Config{MaxConnections: 16, CallerConnections: k.given}
		if got := c.connectionsOfOne(netip.MustParseAddr(k.door)); got != k.want {
			t.Errorf("at %s, %d given: %d, want %d", k.door, k.given, got, k.want)
		}
	}
}

func TestRequestsThatDoNotGoOnMakeRoom(t *testing.T) {
	unfinished := func(c *conn) bool { return c.bodySince.Load() != 0 }
	for name, k := range map[string]struct {
		begun    string
		inFlight int64 // when it has been read
		given    bool  // to net/http
	}{
		"a session's head":   {"POST /v2/models/double/infer HTTP/1.1\r\nHos", 0, false},
		"net/http's head":    {"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", headBytes), 0, true},
		"a session's body":   {"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n{", 2, false},
		"a session's chunks": {"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 2, false},
		"net/http's body":    {"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", 2, true},
	} {
		t.Run(name, func(t *testing.T) {
			m := doubler(t)
			r := newRig(t, func(c *Config) { c.MaxConnections, c.pace.body = 2, 8760*time.Hour }, m)
			for range 2 {
				if _, err := r.connect().Write([]byte(k.begun)); err != nil {
					t.Fatal(err)
				}
			}
			r.underWay(k.inFlight)
			r.knows(0, 2, func(c *conn) bool { return unfinished(c) && (c.hungUp.Load() == nil) == k.given })
			if err := r.ask(r.connect(), askLive); err == nil {
				t.Error("a newcomer took the place of one that may yet go on")
			}
			r.eventually("a newcomer has room", func() error { // once all that was sent is read
				r.g.awake.stood.Add(-int64(patience)) // time goes by
				return r.ask(r.connect(), askLive)
			})
			r.knows(0, 1, unfinished)
		})
	}
}

// What they wait for is the broker, here, or slots: not their callers.
func TestWholeRequestsThatWaitKeepTheirPlaces(t *testing.T) {
	for name, request := range map[string]string{
		"a session's":           "POST /v2/models/none/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
		"a session's in chunks": "POST /v2/models/none/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
		"net/http's":            "POST /v2/models/none/infer HTTP/1.1\r\nHost: h\r\nContent-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *Config) { c.MaxConnections, c.pace.body = 2, 24*time.Hour })
			r.g.models.asking.Lock() // the broker does not answer
			answers := sync.OnceFunc(r.g.models.asking.Unlock)
			defer answers()
			var waiting []net.Conn
			for range 2 {
				c := r.connect()
				if _, err := io.WriteString(c, request); err != nil {
					t.Fatal(err)
				}
				waiting = append(waiting, c)
			}
			r.underWay(2)
			r.knows(0, 2, func(c *conn) bool { return c.bodySince.Load() == 0 })
			r.g.awake.stood.Add(-int64(2 * patience)) // time goes by
			if err := r.ask(r.connect(), askLive); err == nil {
				t.Error("a newcomer took the place of a request that is whole")
			}
			answers()
			for _, c := range waiting {
				if status, body := r.hear(c); status != 404 {
					t.Errorf("%d %s", status, body)
				}
			}
		})
	}
}

func TestABodyIsAwaitedUntilAllOfItIsHere(t *testing.T) {
	r := newRig(t, nil)
	for _, left := range []int64{0, 3, 4} {
		s := &session{conn: &conn{}, in: bufio.NewReader(strings.NewReader("{} "))}
		s.conn.watch.init(r.g)
		s.body.left = left
		if _, err := s.in.Peek(1); err != nil {
			t.Fatal(err)
		}
		s.conn.beginBody(time.Now())
		s.endWholeBody()
		if awaited := s.conn.bodySince.Load() != 0; awaited != (left > 3) {
			t.Errorf("%d bytes are left, 3 are here: awaited is %t", left, awaited)
		}
	}
}

// Its caller may not have had the time to send the rest.
func TestABodyThatWaitedForSlotsIsNotStalledWhenItGoesOn(t *testing.T) {
	r := newRig(t, nil)
	var w watch
	w.init(r.g)
	w.beginBody(time.Now())
	resume := w.pauseBody()
	r.g.awake.stood.Add(-int64(2 * patience)) // time goes by
	resume()
	if w.bodyBeganBefore(r.g.awake.now() - int64(patience)) {
		t.Error("the time in which it waited is counted")
	}
	r.g.awake.stood.Add(-int64(2 * patience))
	if !w.bodyBeganBefore(r.g.awake.now() - int64(patience)) {
		t.Error("the time after that is not")
	}
}

func TestMessagesThatDoNotGoOnMakeRoom(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections = 2 })
	for range 2 {
		r.stall(1000, 10)
	}
	call := func() error {
		_, err := r.client().ServerLive(soon(t), nil)
		return err
	}
	if call() == nil {
		t.Error("a newcomer took the place of one that may yet go on")
	}
	r.g.awake.stood.Add(-int64(patience)) // time goes by
	if err := call(); err != nil {
		t.Errorf("a newcomer: %v", err)
	}
	r.knows(1, 1, func(c *conn) bool { return c.arrivals.any() })
}

func TestRequestsOfHTTP2ThatDoNotGoOnMakeRoom(t *testing.T) {
	r, post := secure(t, func(c *Config) { c.MaxConnections, c.pace.body = 1, 24*time.Hour }, doubler(t))
	body, never := io.Pipe()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if rep, err := post("double", io.MultiReader(strings.NewReader("1234"), body), 16); err == nil {
			rep.Body.Close()
		}
	}()
	r.underWay(1)
	call := func() error {
		c, err := tls.Dial("tcp", strings.TrimPrefix(r.http, "http://"), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return err
		}
		defer c.Close()
		return r.ask(c, askLive)
	}
	if call() == nil {
		t.Error("a newcomer took the place of one that may yet go on")
	}
	r.eventually("a newcomer is answered", func() error {
		r.g.awake.stood.Add(-int64(patience)) // time goes by
		return call()
	})
	never.Close() // or the client would wait for it
	<-ended
}

// Behind a proxy others may be using it.
func TestOneSlowMessageDoesNotCostAConnectionThatIsInUse(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections, c.pace.rest = 1, time.Minute })
	c := r.stall(1000, 10)
	r.passes(30 * time.Second)
	if _, err := c.Write(append(callHeaders(3, "ServerLive"), frame(frameData, flagEndStream, 3, make([]byte, 5))...)); err != nil {
		t.Fatal(err)
	}
	r.knows(1, 1, func(c *conn) bool { return c.served.Load() && !c.busy() && c.slowMessages.Load() })
	call := func() error {
		_, err := r.client().ServerLive(soon(t), nil)
		return err
	}
	if call() == nil {
		t.Error("a newcomer took the place of one that has just been answered")
	}
	r.passes(90 * time.Second) // less than after which it has stopped
	if err := call(); err != nil {
		t.Errorf("a newcomer: %v", err)
	}
	r.isHungUpOn(c)
}

func TestMessagesThatHaveStoppedMakeRoomBeforeThoseThatAreSlow(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections = 2 })
	slow, stopped := r.stall(1000, 10), r.stall(1000, 10)
	r.passes(2 * patience)
	r.ping(slow)
	if _, err := r.client().ServerLive(soon(t), nil); err != nil {
		t.Errorf("a newcomer: %v", err)
	}
	r.isHungUpOn(stopped)
	r.knows(1, 1, func(c *conn) bool { return c.RemoteAddr().String() == slow.LocalAddr().String() })
}

func TestAnOriginIsAnAddressOrANetworkOfIPv6(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.2.3":               "10.1.2.3",
		"::ffff:10.1.2.3":        "10.1.2.3",
		"2001:db8:1:2:3:4:5:6":   "2001:db8:1:2::",
		"2001:db8:1:2:ffff::":    "2001:db8:1:2::",
		"fe80::1:2:3:4%loopback": "fe80::",
	} {
		if got := origin(netip.MustParseAddr(text)).String(); got != want {
			t.Errorf("%s: %s", text, got)
		}
	}
	if origin(netip.Addr{}).IsValid() {
		t.Error(errors.New("an address from nowhere"))
	}
}
