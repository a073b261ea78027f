// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
)

// rpcAnswer is a ModelInferResponse, or with stream a ModelStreamInferResponse.
// Large tensors are sent from the slots: when the transport is done with them,
// the call ends.
type rpcAnswer struct {
	oip.Outgoing
	g    *gateCore
	conn *conn
	call *call // nil if nothing is in place
	left atomic.Int64
	slow *time.Timer // hangs up on a caller that does not read
}

// encode makes the answer of a call that went well, and ends the call, at once
// or when its tensors have been sent.
func (c rpcCall) encode(conn *conn, stream bool) (*rpcAnswer, error) {
	a := &rpcAnswer{g: c.model.g, conn: conn}
	if err := c.writeRegions(); err != nil {
		return nil, err
	}
	head := make([]byte, 0, 128+c.smallBytes())
	if stream {
		head = oip.AppendSize(head, 2, c.messageSize())
	}
	a.SetOwn(c.appendMeta(head))
	for i := range c.outputs {
		o := &c.outputs[i]
		if o.region.region != nil { // one entry for each output all the same
			a.SetOwn(oip.AppendSize(a.Own(), rawOutputs, 0))
			continue
		}
		a.SetOwn(oip.AppendSize(a.Own(), rawOutputs, o.size))
		a.AppendSlots(o.parts)
	}
	if n := a.InPlace(); n > 0 {
		a.call = c.call
		a.left.Store(int64(n))
		conn.sending.Add(1)
		a.g.inFlight.Add(1) // until it is sent
	}
	return a, nil
}

const rawOutputs = 6 // raw_output_contents of a ModelInferResponse

// appendMeta writes the fields of a ModelInferResponse up to its tensors' contents.
func (c rpcCall) appendMeta(b []byte) []byte {
	b = oip.AppendString(oip.AppendString(b, 1, c.modelName()), 2, c.modelVersion())
	if c.id != "" {
		b = oip.AppendString(b, 3, c.id)
	}
	b = c.relayed.appendParameters(b)
	for i := range c.outputs {
		o := &c.outputs[i]
		b = oip.AppendTensor(b, o.name, o.dtype, o.shape...)
	}
	return b
}

// messageSize is the length of the ModelInferResponse.
func (c rpcCall) messageSize() int {
	n := len(c.appendMeta(nil))
	for i := range c.outputs {
		if o := &c.outputs[i]; o.region.region != nil {
			n += 2
		} else {
			n += 1 + protowire.SizeBytes(o.size)
		}
	}
	return n
}

func (c rpcCall) smallBytes() int {
	n := 64 * len(c.outputs)
	for i := range c.outputs {
		if o := &c.outputs[i]; o.region.region == nil && o.size < smallAnswer {
			n += o.size
		}
	}
	return n
}

// Marshal gives the transport the message. The caller's time to read it begins
// here: in a stream it may have waited for the answers before it.
func (a *rpcAnswer) Marshal() mem.BufferSlice {
	if a.call != nil {
		size := 0
		for i := range a.call.outputs {
			size += a.call.outputs[i].size
		}
		a.slow = time.AfterFunc(a.g.answerTime(size), func() {
			a.g.log.Warn("a caller does not read its answer, hung up", "address", a.conn.peer.remote)
			a.conn.Close() // only that makes the transport let go of the slots
		})
	}
	return a.Outgoing.Marshal(a.free)
}

// free counts pieces that the transport is done with.
func (a *rpcAnswer) free(n int) {
	if a.left.Add(-int64(n)) == 0 {
		a.end()
	}
}

// drop ends an answer that is not sent.
func (a *rpcAnswer) drop() {
	if a.call != nil {
		a.end()
	}
}

func (a *rpcAnswer) end() {
	if a.slow != nil {
		a.slow.Stop()
	}
	a.conn.sending.Add(-1)
	a.g.inFlight.Add(-1)
	a.call.count(nil)
	a.call.done()
}

// reportLoad sends the model's load with the answer.
func (c rpcCall) reportLoad(ctx context.Context) {
	if report, wanted := c.loadReport(); wanted {
		// An error here means that the caller does not wait for the answer any more.
		_ = grpc.SetTrailer(ctx, metadata.MD{oip.LoadTrailer: {string(report.Append(nil))}})
	}
}

// tellSignature adds to a model's metadata what the protocol has no words for:
// how large variable dimensions may be.
func tellSignature(ctx context.Context, k *model) {
	_ = grpc.SetHeader(ctx, metadata.Pairs(oip.SignatureHeader, k.sig.String()))
}
