// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/worker"
)

// frame is one of HTTP/2's.
func frame(kind, flags byte, stream uint32, payload []byte) []byte {
	b := binary.BigEndian.AppendUint32(nil, uint32(len(payload))<<8|uint32(kind))
	b = binary.BigEndian.AppendUint32(append(b, flags), stream)
	return append(b, payload...)
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
	const data, headers, settings, ping, endHeaders = 0, 1, 4, 6, 4
	b := append([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), frame(settings, 0, 0, nil)...)
	var list []byte // literals that are not indexed, as they are
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", "/inference.GRPCInferenceService/ModelInfer"}, {":authority", "h"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		list = append(list, 0, byte(len(h[0])))
		list = append(append(list, h[0]...), byte(len(h[1])))
		list = append(list, h[1]...)
	}
	b = append(b, frame(headers, endHeaders, 1, list)...)
	b = append(b, frame(data, 0, 1, binary.BigEndian.AppendUint32([]byte{0}, uint32(announced)))...)
	for sent > 0 {
		n := min(sent, 16<<10)
		b = append(b, frame(data, 0, 1, make([]byte, n))...)
		sent -= n
	}
	if _, err := c.Write(append(b, frame(ping, 0, 0, make([]byte, 8))...)); err != nil {
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
	return c
}

func TestACallerThatStopsInTheMiddleOfAMessageKeepsNoMemoryFromOthers(t *testing.T) {
	m := modelConfig(t, "large", []string{"x:u8[614400]"}, []string{"y:u8[1]"})
	r := newRig(t, func(c *Config) {
		watchful(c)
		c.MaxBufferedBytes, c.pace.budget, c.pace.sweep = 1<<20, patience, patience // this test sweeps
	}, m)
	r.worker(m, func(context.Context, *worker.Batch) error { return nil })
	stalled := r.stall(1<<20, 700<<10)
	answered := make(chan error, 1)
	go func() {
		x := []*oip.ModelInferRequest_InferInputTensor{rpcInput("x", "UINT8", 1, 614400)}
		_, err := r.client().ModelInfer(soon(t), &oip.ModelInferRequest{ModelName: "large", Inputs: x, RawInputContents: [][]byte{make([]byte, 614400)}})
		answered <- err
	}()
	r.eventually("the other waits for room", func() error {
		if !r.g.budget.short.Load() {
			return errors.New("it does not")
		}
		return nil
	})
	r.sweep() // it has been silent since then
	r.passes(time.Hour)
	r.eventually("the other is answered", func() error {
		r.sweep() // the memory comes back when the transport has let go of it
		select {
		case err := <-answered:
			if err != nil {
				t.Fatal(err)
			}
			return nil
		default:
			return errors.New("it is not")
		}
	})
	for buffer := make([]byte, 1<<10); ; {
		if _, err := stalled.Read(buffer); isTimeout(err) {
			t.Fatal("the one that stopped is not hung up on")
		} else if err != nil {
			break
		}
	}
	r.idle()
}
