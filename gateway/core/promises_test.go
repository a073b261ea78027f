// SPDX-License-Identifier: Apache-2.0

package core_test

import (
	"context"
	encbinary "encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/test/testlog"
	"github.com/ringbatch/ringbatch/worker"
)

// One caller misbehaves in each of these tests, and another does not notice.

const inferDouble = "POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\n"

func TestAnnouncedBodiesCostOthersNothing(t *testing.T) {
	r := doublingRig(t, nil)
	for range 8 { // twice the gateway's buffers
		if _, err := fmt.Fprintf(r.connect(), inferDouble+"Content-Length: %d\r\n\r\n{", core.DefaultMaxMessageBytes); err != nil {
			t.Fatal(err)
		}
	}
	r.underWay(8)
	must.Check(t, r.ask(r.connect(), plainDouble()))
	if n := r.g.Used().Load(); n > 1<<20 {
		t.Errorf("%d bytes are counted, eight have come", n)
	}
}

func TestOneCallerHasAQuarterOfTheBuffers(t *testing.T) {
	r := doublingRig(t, func(c *core.Config) { c.MaxBufferedBytes = 4 << 20 })
	c := r.connect() // of 127.0.0.1; it fills its share
	if _, err := fmt.Fprintf(c, inferDouble+"Content-Length: %d\r\n\r\n%s", 1<<20, strings.Repeat(" ", 1<<20-100)); err != nil {
		t.Fatal(err)
	}
	r.until("it has come", func() bool { return r.g.Used().Load() >= 3<<18 })
	large := fmt.Sprintf(inferDouble+"Content-Length: %d\r\n\r\n%s", 1<<19, strings.Repeat(" ", 1<<19-100)+fmt.Sprintf("%100s", goodBody))
	if err := r.ask(r.connect(), large); err == nil || !strings.Contains(err.Error(), "429") {
		t.Errorf("the same caller: %v", err)
	}
	if err := r.ask(r.connectFrom("127.0.0.2"), large); err != nil {
		t.Errorf("another caller: %v", err)
	}
}

func TestHalfBodiesHoldNoSlots(t *testing.T) {
	r := doublingRig(t, func(c *core.Config) { c.Window = 8 })
	binary := fmt.Sprintf(inferDouble+"%s: 0\r\nContent-Length: 16\r\n\r\n12", headerLength)
	for range 32 {
		if _, err := fmt.Fprint(r.connect(), binary); err != nil {
			t.Fatal(err)
		}
	}
	r.underWay(32)
	must.Check(t, r.ask(r.connect(), plainDouble()))
	if k := r.model("double"); k.AllFree() != nil {
		t.Error("they hold slots")
	}
}

func TestOneCallerHasAQuarterOfTheWindow(t *testing.T) {
	m := doubler(t) // batches of 8, 64 slots
	r := newRig(t, func(c *core.Config) { c.Window = 48 }, m)
	_, release := r.holds(m)
	defer release()
	answers := make(chan error, 40)
	for range 39 {
		go func() { answers <- r.ask(r.connect(), plainDouble()) }()
	}
	r.underWay(39)
	inRing := func(want int) {
		t.Helper()
		r.eventually("the ring has them", func() error {
			if s := r.stats("double"); s.QueueLength+s.SlotsRunning != want {
				return fmt.Errorf("%d wait, %d run, want %d", s.QueueLength, s.SlotsRunning, want)
			}
			return nil
		})
	}
	inRing(12)
	go func() { answers <- r.ask(r.connectFrom("127.0.0.2"), plainDouble()) }()
	inRing(13)
	release()
	for range 40 {
		must.Check(t, <-answers)
	}
	r.idle()
}

// The time that a body may take is over long before a slot is free.
func TestACallerIsNotSlowWhileItWaitsForASlot(t *testing.T) {
	t.Parallel()
	const size = 256 << 10 // does not fit ahead of the slot
	m := modelConfig(t, "large", []string{fmt.Sprintf("x:u8[%d]", size)}, []string{fmt.Sprintf("y:u8[%d]", size)})
	r := newRig(t, func(c *core.Config) { c.Window, c.Pace.Body = 1, 100*time.Millisecond }, m)
	begun, goOn := make(chan struct{}, 8), make(chan struct{})
	r.worker(m, func(ctx context.Context, b *worker.Batch) error {
		begun <- struct{}{}
		<-goOn
		return echo(ctx, b)
	})
	numbers := strings.TrimSuffix(strings.Repeat("7,", size), ",")
	answers := make(chan error, 3)
	post := func(header map[string]string, body []byte) {
		go func() {
			if a := r.post("/v2/models/large/infer", header, body); a.status != 200 {
				answers <- fmt.Errorf("%d %s", a.status, a.Error)
				return
			}
			answers <- nil
		}()
	}
	post(map[string]string{headerLength: "0"}, make([]byte, size))
	<-begun
	post(map[string]string{headerLength: "0"}, make([]byte, size))
	post(nil, []byte(fmt.Sprintf(`{"inputs":[{"name":"x","shape":[1,%d],"datatype":"UINT8","data":[%s]}]}`, size, numbers)))
	r.underWay(3)
	time.Sleep(500 * time.Millisecond) // several times Pace.Body
	close(goOn)
	for range 3 {
		must.Check(t, <-answers)
	}
	r.idle()
}

// A gRPC caller that stops in the middle of messages has a quarter of the buffers,
// for a while, and then its connection ends.
func TestHalfMessagesHaveAQuarterOfTheBuffers(t *testing.T) {
	t.Parallel()
	m := modelConfig(t, "large", []string{"x:u8[614400]"}, []string{"y:u8[614400]"})
	r := newRig(t, func(c *core.Config) { c.MaxBufferedBytes = 8 << 20; c.Pace.Budget = time.Second }, m)
	r.worker(m, echo)
	attacker, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.0.2")}}).Dial("tcp", r.grpc)
	must.Do(t, err)
	defer attacker.Close()
	if _, err := attacker.Write(startOf("ModelInfer")); err != nil {
		t.Fatal(err)
	}
	go func() {
		for stream := uint32(1); ; stream += 2 { // half messages, as many as it can send
			b := frame(frameData, 0, stream, encbinary.BigEndian.AppendUint32([]byte{0}, 1<<20))
			for range 32 {
				b = append(b, frame(frameData, 0, stream, make([]byte, 16<<10))...)
			}
			if _, err := attacker.Write(append(b, callHeaders(stream+2, "ModelInfer")...)); err != nil {
				return
			}
		}
	}()
	r.until("its half messages are counted", func() bool { return r.g.Used().Load() >= 1<<20 })
	for range 5 {
		if _, err := r.client().ModelInfer(soon(t), largeMessage()); err != nil {
			t.Error(err)
		}
		if n := r.g.Used().Load(); n > 6<<20 {
			t.Errorf("%d bytes are counted", n)
		}
	}
	_ = attacker.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, attacker); core.IsTimeout(err) {
		t.Error("it is not hung up on")
	}
	r.idle()
}

func TestALongLivedGRPCConnectionIsNotCountedFull(t *testing.T) {
	t.Parallel()
	r := doublingRig(t, func(c *core.Config) { c.MaxBufferedBytes = 256 << 10; c.Pace.Budget = 50 * time.Millisecond })
	s, err := r.client().ModelStreamInfer(soon(t))
	must.Do(t, err)
	for i := range 2000 { // many times the caller's part, on one stream that never is idle
		if err := s.Send(doubleMessage()); err != nil {
			t.Fatalf("after %d: %v", i, err)
		}
		if _, err := s.Recv(); err != nil {
			t.Fatalf("after %d: %v", i, err)
		}
	}
}

func TestConnectionsBeyondTheLimitsAreRefused(t *testing.T) {
	var log testlog.Log
	r := newRig(t, func(c *core.Config) {
		c.MaxConnections, c.Logger = 8, slog.New(slog.NewTextHandler(&log, nil))
	})
	ask := "GET /v2/health/live HTTP/1.1\r\nHost: h\r\n\r\n"
	for range 2 {
		must.Do(t, r.ask(r.connect(), ask))
	}
	if text, _ := io.ReadAll(r.connect()); !strings.Contains(string(text), "--caller-connections") {
		t.Errorf("the third of one address is told %q", text)
	}
	if err := r.ask(r.connectFrom("127.0.0.2"), ask); err != nil {
		t.Errorf("another address: %v", err)
	}
	if got := r.doors.RefusedConnections(); got["http"] != 1 || got["grpc"] != 0 {
		t.Errorf("counted: %v", got)
	}
	if text := log.String(); !strings.Contains(text, "--max-connections") || !strings.Contains(text, "door=http") {
		t.Errorf("logged: %s", text)
	}
}

// A page of another site can point its own name to this address.
func TestOnlyKnownHostsAreServedWhereCallersNeedNoToken(t *testing.T) {
	m := doubler(t)
	change := func(c *core.Config) {
		c.AllowedHosts = []string{"models.example"}
		c.Other = http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	}
	r := newRig(t, change, m)
	r.worker(m, double)
	port := r.http[strings.LastIndexByte(r.http, ':'):]
	for host, allowed := range map[string]bool{
		"127.0.0.1" + port: true, "localhost" + port: true, "LOCALHOST": true, "[::1]" + port: true, "10.1.2.3": true,
		"models.example" + port: true, "Models.Example.": true,
		"evil.example" + port: false, "models.example.evil": false, "localhost.evil" + port: false, "127.0.0.1.evil": false,
	} {
		for _, path := range []string{"/v2", "/v2/models/double/stats", "/v2/repository/index", "/v2/health/live", "/metrics",
			"/dashboard"} {
			req, err := http.NewRequestWithContext(soon(t), http.MethodGet, r.http+path, nil)
			must.Do(t, err)
			req.Host = host
			a := r.do(req)
			if allowed && a.status != 200 || !allowed && (a.status != http.StatusMisdirectedRequest ||
				!strings.Contains(a.Error, "--allowed-host")) {
				t.Errorf("%s as %s: %d %s", path, host, a.status, a.Error)
			}
		}
	}
	tokens := filepath.Join(t.TempDir(), "tokens")
	must.Do(t, os.WriteFile(tokens, []byte("me a-token-0123456789\n"), 0o600))
	withTokens := newRig(t, func(c *core.Config) { c.TokenFile = tokens })
	req, err := http.NewRequestWithContext(soon(t), http.MethodGet, withTokens.http+"/v2", nil)
	must.Do(t, err)
	req.Host = "any.example"
	req.Header.Set("Authorization", "Bearer a-token-0123456789")
	withTokens.do(req).is(t, "with a token", 200)
}

// A drain waits for accepted requests, not for incomplete ones.
func TestADrainDoesNotWaitForHalfRequests(t *testing.T) {
	t.Parallel()
	m := doubler(t)
	r := newRig(t, func(c *core.Config) { c.Pace.Body, c.Pace.Stall = 200*time.Millisecond, 200*time.Millisecond }, m)
	_, release := r.holds(m)
	defer release()
	finished := make(chan error, 2)
	go func() { finished <- r.ask(r.connect(), plainDouble()) }()
	go func() {
		_, err := r.client().ModelInfer(soon(t), doubleMessage())
		finished <- err
	}()
	r.underWay(2)
	for _, half := range []string{"POST /v2", inferDouble, inferDouble + "Content-Length: 100\r\n\r\n{", inferDouble +
		"Transfer-Encoding: chunked\r\n\r\n5\r\n{"} {
		if _, err := io.WriteString(r.connect(), half); err != nil {
			t.Fatal(err)
		}
	}
	c, err := net.Dial("tcp", r.grpc)
	must.Do(t, err)
	defer c.Close()
	if _, err := c.Write(append(startOf("ModelInfer"), frame(frameData, 0, 1, []byte{0, 0, 1, 0, 0, 'x'})...)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- r.stop() }()
	r.until("it drains", func() bool { return r.g.Draining.Load() == core.Refusing })
	select {
	case err := <-ended:
		t.Fatalf("it has not waited for what was accepted: %v", err)
	case <-time.After(time.Second):
	}
	release()
	for range cap(finished) {
		must.Check(t, <-finished)
	}
	must.Check(t, <-ended)
}

const (
	frameData = 0
)

// frame is one of HTTP/2's.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := encbinary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	b = encbinary.BigEndian.AppendUint32(append(b, flags), stream)
	return append(b, payload...)
}

func callHeaders(stream uint32, method string) []byte {
	const headers, endHeaders = 1, 4
	var list []byte // literals that are not indexed, as they are
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", "/inference.GRPCInferenceService/" + method},
		{":authority", "h"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		list = append(list, 0, byte(len(h[0])))
		list = append(append(list, h[0]...), byte(len(h[1])))
		list = append(list, h[1]...)
	}
	return frame(headers, endHeaders, stream, list)
}

func largeMessage() *oip.ModelInferRequest {
	x := []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "UINT8", 1, 614400)}
	return &oip.ModelInferRequest{ModelName: "large", Inputs: x, RawInputContents: [][]byte{make([]byte, 614400)}}
}

// startOf is a connection's beginning, and the headers of a call as its first stream.
func startOf(method string) []byte {
	const settings = 4
	b := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), frame(settings, 0, 0, nil)...)
	return append(b, callHeaders(1, method)...)
}
