// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	rpcstatus "google.golang.org/grpc/status"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/testlog"
)

const (
	askLive  = "GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"
	askSpelt = "GET /v2/health/%6cive HTTP/1.1\r\nHost: h\r\n\r\n" // net/http's
)

// ask writes a request and reads its answer.
func (r *rig) ask(c net.Conn, request string) error {
	if _, err := io.WriteString(c, request); err != nil {
		return err
	}
	rep, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	defer rep.Body.Close()
	text, err := io.ReadAll(rep.Body)
	if err == nil && rep.StatusCode != 200 {
		err = fmt.Errorf("%d %s", rep.StatusCode, text)
	}
	return err
}

// connectIdle is a connection whose one request was answered.
func (r *rig) connectIdle(request string) net.Conn {
	r.t.Helper()
	c := r.connect()
	if err := r.ask(c, request); err != nil {
		r.t.Fatal(err)
	}
	r.isIdle(c)
	return c
}

func plainDouble() string {
	body := `{"inputs":[` + goodInput + `]}`
	return fmt.Sprintf("POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

// isIdle waits until the gateway has done with a caller.
func (r *rig) isIdle(c net.Conn) {
	r.t.Helper()
	r.eventually("the connection is idle", func() error {
		for _, l := range r.g.doors {
			l.mu.Lock()
			defer l.mu.Unlock()
			for known := range l.conns {
				if known.RemoteAddr().String() == c.LocalAddr().String() && !known.busy() {
					return nil
				}
			}
		}
		return errors.New("it is not")
	})
}

func TestTheConnectionThatIsIdleForLongestMakesRoomForANewcomer(t *testing.T) {
	for name, request := range map[string]string{"a session's": askLive, "net/http's": askSpelt} {
		t.Run(name, func(t *testing.T) {
			m := doubler(t)
			r := newRig(t, func(c *Config) { c.MaxConnections = 4 }, m)
			h, release := r.holds(m)
			defer release()
			busy := r.connect()
			answered := make(chan error, 1)
			go func() { answered <- r.ask(busy, plainDouble()) }()
			<-h.began
			var idle []net.Conn
			for range 3 {
				idle = append(idle, r.connectIdle(request))
			}
			if err := r.ask(idle[0], request); err != nil { // now it is the latest
				t.Fatal(err)
			}
			r.isIdle(idle[0])
			if err := r.ask(r.connect(), request); err != nil {
				t.Errorf("the newcomer: %v", err)
			}
			if _, err := idle[1].Read(make([]byte, 1)); err != io.EOF {
				t.Errorf("the one that was idle for longest: %v", err)
			}
			for _, c := range []net.Conn{idle[0], idle[2]} {
				if err := r.ask(c, request); err != nil {
					t.Errorf("the others: %v", err)
				}
			}
			release()
			if err := <-answered; err != nil {
				t.Errorf("the one that was busy: %v", err)
			}
		})
	}
}

func TestConnectionsBeyondTheLimitAreHungUpOnWhileAllAreBusy(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) { c.MaxConnections = 4 }, m)
	_, release := r.holds(m)
	defer release()
	answered := make(chan error, 4)
	for i := range 4 {
		c := r.connect()
		go func() { answered <- r.ask(c, plainDouble()) }()
		r.eventually("it is under way", func() error {
			if n := r.g.inFlight.Load(); n != int64(i+1) {
				return fmt.Errorf("%d are", n)
			}
			return nil
		})
	}
	for range 20 {
		c := r.connect()
		text, _ := io.ReadAll(c)
		if len(text) > 0 && !strings.Contains(string(text), "too many connections") {
			t.Errorf("%s", text)
		}
	}
	release()
	for range 4 {
		if err := <-answered; err != nil {
			t.Error(err)
		}
	}
	r.eventually("there is room again", func() error { return r.ask(r.connect(), askLive) })
}

func TestAGRPCConnectionWithoutCallsMakesRoomForANewcomer(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) { c.MaxConnections = 2 }, m)
	h, release := r.holds(m)
	defer release()
	answered := make(chan error, 1)
	busy := r.client()
	go func() {
		_, err := busy.ModelInfer(soon(t), doubleMessage())
		answered <- err
	}()
	<-h.began
	call := func() error {
		_, err := r.client().ServerLive(soon(t), nil)
		return err
	}
	for range 5 { // each takes the place of the one before it
		r.eventually("a newcomer is answered", call)
	}
	var stream oip.GRPCInferenceService_ModelStreamInferClient
	r.eventually("a stream takes its place, too", func() (err error) {
		if stream, err = r.client().ModelStreamInfer(soon(t)); err != nil {
			return err
		}
		if err := stream.Send(&oip.ModelInferRequest{ModelName: "none"}); err != nil {
			return err
		}
		_, err = stream.Recv() // now it is known
		return err
	})
	if err := call(); rpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("a newcomer while both are busy: %v", err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("a stream: %v", err)
	}
	r.eventually("a newcomer is answered", call)
	release()
	if err := <-answered; err != nil {
		t.Errorf("the one that was busy: %v", err)
	}
}

// streams of one connection each, whose one request has been answered.
func (r *rig) idleStreams(n int) (all []oip.GRPCInferenceService_ModelStreamInferClient) {
	r.t.Helper()
	for range n {
		s, err := r.client().ModelStreamInfer(soon(r.t))
		if err != nil {
			r.t.Fatal(err)
		}
		r.askStream(s)
		all = append(all, s)
	}
	r.knows(1, n, func(c *conn) bool { return c.openStreams.Load() == 1 && !c.busy() })
	return all
}

func (r *rig) askStream(s oip.GRPCInferenceService_ModelStreamInferClient) {
	r.t.Helper()
	if err := s.Send(&oip.ModelInferRequest{ModelName: "none"}); err != nil {
		r.t.Fatal(err)
	}
	if _, err := s.Recv(); err != nil {
		r.t.Fatal(err)
	}
}

// newcomer calls over a connection of its own, and does not try again later.
func (r *rig) newcomer() error {
	r.t.Helper()
	c, err := grpc.NewClient(r.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	defer c.Close()
	_, err = oip.NewGRPCInferenceServiceClient(c).ServerLive(soon(r.t), nil)
	return err
}

func TestTheConnectionWhoseStreamsAreIdleForLongestMakesRoomForANewcomer(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections, c.pace.stream = 3, time.Hour })
	streams := r.idleStreams(3)
	r.passes(59 * time.Minute)
	if err := r.newcomer(); rpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("a newcomer took the place of a stream that is not idle for long: %v", err)
	}
	r.askStream(streams[0])
	r.knows(1, 3, func(c *conn) bool { return !c.busy() })
	r.passes(2 * time.Minute)
	r.askStream(streams[1]) // now the third is the last
	r.knows(1, 3, func(c *conn) bool { return !c.busy() })
	if err := r.newcomer(); err != nil {
		t.Errorf("a newcomer: %v", err)
	}
	if _, err := streams[2].Recv(); rpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("the stream that was idle for longest: %v", err)
	}
	for _, s := range streams[:2] {
		r.askStream(s)
	}
}

func TestAStreamWithARequestUnderWayKeepsItsConnection(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) { c.MaxConnections = 1 }, m)
	h, release := r.holds(m)
	defer release()
	s, err := r.client().ModelStreamInfer(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(doubleMessage()); err != nil {
		t.Fatal(err)
	}
	<-h.began
	r.passes(24 * time.Hour)
	if err := r.newcomer(); rpcstatus.Code(err) != codes.Unavailable {
		t.Errorf("a newcomer: %v", err)
	}
	release()
	if a, err := s.Recv(); err != nil || a.ErrorMessage != "" {
		t.Errorf("the stream: %v, %v", a, err)
	}
}

func TestPingsDoNotKeepTheConnectionOfAnIdleStream(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections, c.pace.stream = 1, time.Hour })
	c, err := net.Dial("tcp", r.grpc)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write(startOf("ModelStreamInfer")); err != nil {
		t.Fatal(err)
	}
	r.knows(1, 1, func(c *conn) bool { return c.openStreams.Load() == 1 })
	r.passes(2 * time.Hour)
	r.ping(c)
	if err := r.newcomer(); err != nil {
		t.Errorf("a newcomer: %v", err)
	}
	r.isHungUpOn(c)
}

// It has been read and waits to be decoded: nothing else tells of it yet.
func TestARequestThatHasComeWholeKeepsTheConnectionOfAnIdleStream(t *testing.T) {
	const ping = 6
	message := []byte{0, 0, 0, 0, 1, 7}
	for name, came := range map[string]struct {
		frame []byte
		keeps bool
	}{
		"a request":           {frame(frameData, 0, 1, message), true},
		"the last of a call":  {frame(frameData, flagEndStream, 3, message), true},
		"one of no bytes":     {frame(frameData, 0, 1, make([]byte, 5)), true},
		"a ping":              {frame(ping, 0, 0, make([]byte, 8)), false},
		"the end of a stream": {frame(frameData, flagEndStream, 1, nil), false},
		"padding":             {frame(frameData, flagPadded, 1, []byte{2, 0, 0}), false},
	} {
		l := &listener{g: &Gateway{awake: newAwake()}, budget: true, conns: map[*conn]struct{}{}}
		l.g.cfg.pace.stream = time.Hour
		c := &conn{l: l}
		c.arrivals.init(l.g.awake)
		c.arrivals.follow(startOf("ModelStreamInfer"))
		defer c.openStream()()
		l.conns[c] = struct{}{}
		passes := func(d time.Duration) { l.g.awake.stood.Add(-int64(d)) }
		passes(2 * time.Hour)
		c.arrivals.follow(came.frame)
		if first := l.makeRoom(netip.Addr{}); (first == nil) != came.keeps {
			t.Errorf("%s: it keeps its connection: %t", name, first == nil)
		}
		if !came.keeps {
			continue
		}
		l.g.awake.stood.Add(int64(time.Hour)) // it stood still: the moment is one to come
		if l.makeRoom(netip.Addr{}) != nil {
			t.Errorf("%s: it loses its connection after a standstill", name)
		}
		passes(2 * time.Hour)
		if l.makeRoom(netip.Addr{}) == nil {
			t.Errorf("%s: it keeps its connection for longer than a stream may", name)
		}
	}
}

func TestADoorThatIsFullIsLoggedAndCounted(t *testing.T) {
	var log testlog.Log
	r := newRig(t, func(c *Config) {
		c.MaxConnections = 1
		c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	r.idleStreams(1)
	for range 3 {
		if err := r.newcomer(); rpcstatus.Code(err) != codes.Unavailable {
			t.Errorf("a newcomer: %v", err)
		}
	}
	if got := r.g.RefusedConnections(); got["grpc"] < 3 || got["http"] != 0 {
		t.Errorf("counted: %v", got)
	}
	if text := log.String(); !strings.Contains(text, "--max_connections") || !strings.Contains(text, "door=grpc") {
		t.Errorf("logged: %s", text)
	}
}

// Its next request is on the way, and would be lost.
func TestNobodyTakesThePlaceOfACallerThatHasJustBeenAnswered(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections, c.pace.rest = 2, patience })
	for range 2 {
		r.connectIdle(askLive)
	}
	if err := r.ask(r.connect(), askLive); err == nil {
		t.Error("a newcomer took one's place at once")
	}
	r.g.awake.stood.Add(-int64(patience)) // time goes by
	r.eventually("a newcomer is answered", func() error { return r.ask(r.connect(), askLive) })
}

// Who was read before it was noticed that the gateway had stood still.
func TestAfterAStandstillConnectionsMakeRoom(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections = 2 })
	for range 2 {
		r.connectIdle(askLive)
	}
	r.g.awake.stood.Add(int64(time.Hour))
	if err := r.ask(r.connect(), askLive); err != nil {
		t.Error(err)
	}
}

func TestWhoNeverAskedForAnythingMakesRoomFirst(t *testing.T) {
	r := newRig(t, func(c *Config) { c.MaxConnections = 2 })
	served := r.connectIdle(askLive)
	silent := r.connect()
	r.isIdle(silent)
	if err := r.ask(r.connect(), askLive); err != nil {
		t.Fatal(err)
	}
	if _, err := silent.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("the silent one: %v", err)
	}
	if err := r.ask(served, askLive); err != nil {
		t.Errorf("the one that had been served: %v", err)
	}
}

// gRPC sends an answer after the call has ended.
func TestAConnectionThatIsWrittenToIsNotIdle(t *testing.T) {
	r := newRig(t, nil)
	ours, theirs := net.Pipe()
	defer theirs.Close()
	c := rpcConn{ours, &conn{Conn: ours, l: r.g.doors[0]}}
	written := make(chan error, 1)
	go func() {
		_, err := c.Write([]byte("an answer"))
		written <- err
	}()
	one := make([]byte, 1)
	if _, err := theirs.Read(one); err != nil || !c.conn.busy() {
		t.Errorf("while it is written to it is idle, or %v", err)
	}
	if _, err := io.ReadFull(theirs, make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	if err := <-written; err != nil || c.conn.busy() {
		t.Errorf("it stays busy, or %v", err)
	}
}
