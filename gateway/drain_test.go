// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/worker"
)

func TestADrainDoesNotWaitForRequestsThatDoNotGoOn(t *testing.T) {
	m := doubler(t)
	r := newRig(t, func(c *Config) {
		c.pace = pace{body: 24 * time.Hour, answer: 24 * time.Hour, idle: 24 * time.Hour, sweep: time.Second, rate: leastRate}
	}, m)
	_, release := r.holds(m)
	defer release()
	finished := make(chan error, 2)
	go func() { finished <- r.ask(r.connect(), plainDouble()) }()
	go func() {
		_, err := r.client().ModelInfer(soon(t), doubleMessage())
		finished <- err
	}()
	r.underWay(2)

	stopped := make(chan string, 5)
	for _, sent := range []int{0, 1000} { // by gRPC
		c := r.stall(1<<20, sent)
		go func() {
			r.isHungUpOn(c)
			stopped <- ""
		}()
	}
	for _, start := range []string{
		"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{",
		"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
		"POST /v2/models/double/infer HTTP/1.1\r\nHost: h\r\nContent-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{", // net/http's
	} {
		c := r.connect()
		if _, err := io.WriteString(c, start); err != nil {
			t.Fatal(err)
		}
		go func() {
			if status, body := r.hear(c); status != 408 {
				stopped <- fmt.Sprintf("%d %s", status, body)
			}
			stopped <- ""
		}()
	}
	r.underWay(5)

	ended := make(chan error, 1)
	go func() { ended <- r.stop() }()
	for range cap(stopped) {
		r.eventually("those that have stopped are given up", func() error {
			select {
			case wrong := <-stopped:
				if wrong != "" {
					t.Error(wrong)
				}
				return nil
			default:
				r.g.awake.stood.Add(-int64(r.g.cfg.pace.stall)) // time goes by
				return fmt.Errorf("they are not")
			}
		})
	}
	r.underWay(2) // the others are not
	release()
	for range cap(finished) {
		if err := <-finished; err != nil {
			t.Error(err)
		}
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestADrainDoesNotWaitForCallersThatDoNotRead(t *testing.T) {
	big := modelConfig(t, "big", []string{"x:u8[8000000]"}, []string{"y:u8[8000000]"}) // more than the kernel takes
	large := modelConfig(t, "large", []string{"x:u8[614400]"}, []string{"y:u8[614400]"})
	x := make([]byte, 8_000_000)
	head := `{"inputs":[{"name":"x","shape":[1,8000000],"datatype":"UINT8","parameters":{"binary_data_size":8000000}}],"parameters":{"binary_data_output":true}}`
	plain := func(r *rig) {
		c := r.connect()
		_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
		fmt.Fprintf(c, "POST /v2/models/big/infer HTTP/1.1\r\nHost: h\r\n%s: %d\r\nContent-Length: %d\r\n\r\n%s", headerLength, len(head), len(head)+len(x), head)
		_, _ = c.Write(x)
	}
	streaming := func(r *rig) {
		s, err := r.client().ModelStreamInfer(soon(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(largeMessage()); err != nil {
			t.Fatal(err)
		}
	}
	unary := func(r *rig) {
		c, err := net.Dial("tcp", r.grpc)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		body, err := proto.Marshal(largeMessage())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(wholeCall(body)); err != nil { // it never opens a window
			t.Fatal(err)
		}
	}
	for name, k := range map[string]struct {
		call  func(*rig)
		model broker.ModelConfig
	}{"HTTP": {plain, big}, "a stream": {streaming, large}, "a call": {unary, large}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *Config) {
				c.pace = pace{body: 24 * time.Hour, answer: 24 * time.Hour, idle: 24 * time.Hour, sweep: time.Second, rate: leastRate}
				c.Window = 8
			}, k.model)
			r.worker(k.model, echo)
			k.call(r)
			r.eventually("it is answered", func() error {
				if n := r.stats(k.model.Name).Ended["OK"]; n != 1 {
					return fmt.Errorf("%d are", n)
				}
				return nil
			})
			ended := make(chan error, 1)
			go func() { ended <- r.stop() }()
			r.eventually("the drain ends", func() error {
				select {
				case err := <-ended:
					if err != nil {
						t.Error(err)
					}
					return nil
				default:
					r.g.awake.stood.Add(-int64(r.g.cfg.pace.stall)) // time goes by
					return errors.New("it does not")
				}
			})
		})
	}
}

// The kernel takes more of an answer only when much of what it has was read.
func TestADrainWaitsForAGRPCCallerThatReadsSlowly(t *testing.T) {
	const size = 16 << 20 // more than the kernel takes
	big := modelConfig(t, "big", []string{"x:u8[16]"}, []string{fmt.Sprintf("y:u8[%d]", size)})
	r := newRig(t, func(c *Config) { c.pace.answer, c.Window = 8760*time.Hour, 8 }, big)
	r.worker(big, func(_ context.Context, b *worker.Batch) error { b.Output(0); return nil })
	body, err := proto.Marshal(&oip.ModelInferRequest{ModelName: "big", Inputs: []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "UINT8", 1, 16)}, RawInputContents: [][]byte{make([]byte, 16)}})
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := net.Dial("tcp", r.grpc)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	_ = theirs.SetDeadline(time.Now().Add(patience))
	if _, err := theirs.Write(wholeCall(body, wideWindows()...)); err != nil {
		t.Fatal(err)
	}
	r.knows(1, 1, func(c *conn) bool { return c.toRead.Load() > 0 && c.underWay.Load() <= c.toRead.Load() })
	l := r.g.doors[1]
	l.mu.Lock()
	var ours *conn
	for c := range l.conns {
		ours = c
	}
	l.mu.Unlock()
	stalls, piece := stalls{}, make([]byte, 64<<10)
	for got := 0; got < size; {
		l.endStalled(stalls)
		r.g.awake.stood.Add(-int64(2 * patience)) // time goes by
		before := ours.received()
		for ours.received() == before {
			n, err := theirs.Read(piece)
			if err != nil {
				t.Fatal(err)
			}
			if got += n; got >= size {
				return // the rest is with the kernel
			}
		}
		if l.endStalled(stalls); ours.gone.Load() {
			t.Fatalf("one that reads is hung up on after %d bytes", got)
		}
	}
}

// A request that waited for slots is not stalled when it goes on.
func TestADrainDoesNotCountTheTimeInWhichARequestWaitsForRoom(t *testing.T) {
	r := newRig(t, nil)
	l, s, stalls := r.g.doors[0], &stream{}, stalls{}
	s.init(r.g)
	l.mu.Lock()
	l.streams[s] = struct{}{}
	l.mu.Unlock()
	s.beginBody(time.Now())
	l.endStalled(stalls)
	resume := s.pauseBody()
	r.g.awake.stood.Add(-int64(2 * patience)) // time goes by
	l.endStalled(stalls)
	resume()
	if stalls.longer(patience, s, s.bodyGot.Load(), r.g.awake.now()) {
		t.Error("that time is counted against the caller")
	}
	l.mu.Lock()
	delete(l.streams, s)
	l.mu.Unlock()
}

// Nor that in which a gRPC caller waits for us.
func TestADrainDoesNotGiveUpWhoItHoldsUp(t *testing.T) {
	r := newRig(t, nil)
	if _, err := r.client().ServerLive(soon(t), nil); err != nil {
		t.Fatal(err)
	}
	var l *listener
	var c *conn
	for _, d := range r.g.doors {
		d.mu.Lock()
		for known := range d.conns {
			l, c = d, known
		}
		d.mu.Unlock()
	}
	r.eventually("the call has ended", func() error {
		if c.busy() {
			return fmt.Errorf("it has not")
		}
		return nil
	})
	stalls := stalls{}
	c.fullStreams.Store(1)
	for range 3 {
		l.endStalled(stalls)
		r.g.awake.stood.Add(-int64(2 * patience)) // time goes by
	}
	if c.gone.Load() {
		t.Error("it is hung up on")
	}
	c.fullStreams.Store(0)
	r.eventually("one that nobody holds up is not waited for", func() error {
		l.endStalled(stalls)
		r.g.awake.stood.Add(-int64(2 * patience))
		if !c.gone.Load() {
			return fmt.Errorf("it is")
		}
		return nil
	})
}
