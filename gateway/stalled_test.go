// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/gateway/oip"
)

// frame is one of HTTP/2's.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	b = binary.BigEndian.AppendUint32(append(b, flags), stream)
	return append(b, payload...)
}

// startOfCall is a connection's beginning, with more frames if there are, and the
// headers of ModelInfer, as the first stream.
func startOfCall(more ...byte) []byte { return startOf("ModelInfer", more...) }

func startOf(method string, more ...byte) []byte {
	const settings = 4
	b := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), frame(settings, 0, 0, nil)...)
	return append(append(b, more...), callHeaders(1, method)...)
}

func callHeaders(stream uint32, method string) []byte {
	const headers, endHeaders = 1, 4
	var list []byte // literals that are not indexed, as they are
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", "/inference.GRPCInferenceService/" + method}, {":authority", "h"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		list = append(list, 0, byte(len(h[0])))
		list = append(append(list, h[0]...), byte(len(h[1])))
		list = append(list, h[1]...)
	}
	return frame(headers, endHeaders, stream, list)
}

// wholeCall is all of a call, whose message fits into the gateway's window.
func wholeCall(message []byte, more ...byte) []byte {
	b := append(startOfCall(more...), frame(frameData, 0, 1, binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))))...)
	for len(message) > 0 {
		n := min(len(message), 16<<10)
		b = append(b, frame(frameData, 0, 1, message[:n])...)
		message = message[n:]
	}
	return append(b, frame(frameData, flagEndStream, 1, nil)...)
}

// wideWindows are frames that let the gateway send as much as it likes.
func wideWindows() []byte {
	const settings, update, streamWindow, most = 4, 8, 4, 1<<31 - 1
	ofStreams := binary.BigEndian.AppendUint32([]byte{0, streamWindow}, most)
	ofAll := binary.BigEndian.AppendUint32(nil, most-65535)
	return append(frame(settings, 0, 0, ofStreams), frame(update, 0, 0, ofAll)...)
}

// stall calls by gRPC and stops in the middle of its message. What it has sent
// has been received when it returns.
func (r *rig) stall(announced, sent int) net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.grpc)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	b := append(startOfCall(), frame(frameData, 0, 1, binary.BigEndian.AppendUint32([]byte{0}, uint32(announced)))...)
	for sent > 0 {
		n := min(sent, 16<<10)
		b = append(b, frame(frameData, 0, 1, make([]byte, n))...)
		sent -= n
	}
	if _, err := c.Write(b); err != nil {
		r.t.Fatal(err)
	}
	r.ping(c)
	return c
}

// ping returns when the gateway has read everything that was sent, and is done
// with its answer. (It takes a third within seconds for an attack.)
func (r *rig) ping(c net.Conn) {
	r.t.Helper()
	const ping = 6
	if _, err := c.Write(frame(ping, 0, 0, make([]byte, 8))); err != nil {
		r.t.Fatal(err)
	}
	for head := make([]byte, 9); head[3] != ping || head[4]&1 == 0; {
		if _, err := io.ReadFull(c, head); err != nil {
			r.t.Fatal(err)
		}
		if _, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(head)>>8)); err != nil {
			r.t.Fatal(err)
		}
	}
	r.knows(1, 1, func(known *conn) bool { return known.RemoteAddr().String() == c.LocalAddr().String() && !known.busy() })
}

// short is a rig whose memory does not do for two messages of its model, and a
// caller of it that waits for the other's: its answer comes.
func short(t *testing.T) (r *rig, call func() (answered chan error)) {
	m := modelConfig(t, "large", []string{"x:u8[614400]"}, []string{"y:u8[614400]"})
	r = newRig(t, func(c *Config) {
		c.pace = pace{body: time.Minute, answer: 24 * time.Hour, idle: 24 * time.Hour, budget: patience, sweep: patience, rate: leastRate} // the test sweeps
		c.MaxBufferedBytes = 1 << 20
	}, m)
	r.worker(m, echo)
	return r, func() chan error {
		answered := make(chan error, 1)
		go func() {
			_, err := r.client().ModelInfer(soon(t), largeMessage())
			answered <- err
		}()
		r.eventually("the other waits for room", func() error {
			if !r.g.budget.short.Load() {
				return errors.New("it does not")
			}
			return nil
		})
		return answered
	}
}

func largeMessage() *oip.ModelInferRequest {
	x := []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "UINT8", 1, 614400)}
	return &oip.ModelInferRequest{ModelName: "large", Inputs: x, RawInputContents: [][]byte{make([]byte, 614400)}}
}

// isAnswered sweeps until a call is.
func (r *rig) isAnswered(answered chan error) {
	r.t.Helper()
	r.eventually("the other is answered", func() error {
		r.sweep() // the memory comes back when the transport has let go of it
		select {
		case err := <-answered:
			if err != nil {
				r.t.Fatal(err)
			}
			return nil
		default:
			return errors.New("it is not")
		}
	})
}

func (r *rig) isHungUpOn(c net.Conn) {
	r.t.Helper()
	for buffer := make([]byte, 1<<10); ; {
		if _, err := c.Read(buffer); isTimeout(err) {
			r.t.Fatal("the one that stopped is not hung up on")
		} else if err != nil {
			return
		}
	}
}

func TestACallerThatStopsInTheMiddleOfAMessageKeepsNoMemoryFromOthers(t *testing.T) {
	r, call := short(t)
	stalled := r.stall(1<<20, 700<<10)
	answered := call()
	r.sweep()
	r.ping(stalled) // what is no part of the message does not count
	r.passes(time.Hour)
	r.isAnswered(answered)
	r.isHungUpOn(stalled)
	r.idle()
}

func TestCallersThatHoldNoMessageAreLeftAloneWhileMemoryIsShort(t *testing.T) {
	r, call := short(t)
	open := func() oip.GRPCInferenceService_ModelStreamInferClient {
		s, err := r.client().ModelStreamInfer(soon(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(largeMessage()); err != nil {
			t.Fatal(err)
		}
		return s
	}
	receive := func(s oip.GRPCInferenceService_ModelStreamInferClient) {
		t.Helper()
		if rep, err := s.Recv(); err != nil || rep.ErrorMessage != "" {
			t.Fatal(rep, err)
		}
	}
	idle := open()
	receive(idle)
	unread := open() // its answer is more than the transport takes unasked
	r.eventually("the answer waits for its caller", func() error {
		r.g.sweeps.mu.Lock()
		defer r.g.sweeps.mu.Unlock()
		if len(r.g.sweeps.answers) != 1 {
			return errors.New("it does not")
		}
		return nil
	})
	r.stall(1<<20, 700<<10)
	answered := call()
	r.sweep()
	r.passes(time.Hour)
	r.isAnswered(answered)
	receive(unread)
	if err := idle.Send(largeMessage()); err != nil {
		t.Fatal(err)
	}
	receive(idle)
}
