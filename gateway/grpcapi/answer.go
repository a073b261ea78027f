// SPDX-License-Identifier: Apache-2.0

package grpcapi

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/gateway/core"
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
	g    *core.Gateway
	conn *core.Conn
	call *core.Call // nil if nothing is in place
	left atomic.Int64
	slow *time.Timer // hangs up on a caller that does not read
}

// encode makes the answer of a call that went well, and ends the call, at once
// or when its tensors have been sent.
func (c rpcCall) encode(conn *core.Conn, stream bool) (*rpcAnswer, error) {
	a := &rpcAnswer{g: c.Model.G, conn: conn}
	if err := c.WriteRegions(); err != nil {
		return nil, err
	}
	head := make([]byte, 0, 128+c.smallBytes())
	if stream {
		head = oip.AppendSize(head, 2, c.messageSize())
	}
	a.SetOwn(c.appendMeta(head))
	for i := range c.Outputs {
		o := &c.Outputs[i]
		if o.Region.Region != nil { // one entry for each output all the same
			a.SetOwn(oip.AppendSize(a.Own(), rawOutputs, 0))
			continue
		}
		a.SetOwn(oip.AppendSize(a.Own(), rawOutputs, o.Size))
		a.AppendSlots(o.Parts)
	}
	if n := a.InPlace(); n > 0 {
		a.call = c.Call
		a.left.Store(int64(n))
		conn.Sending.Add(1)
		a.g.InFlight.Add(1) // until it is sent
	}
	return a, nil
}

// Outputs below this size are copied into the answer.
const smallAnswer = 16 << 10

const rawOutputs = 6 // raw_output_contents of a ModelInferResponse

// appendMeta writes the fields of a ModelInferResponse up to its tensors' contents.
func (c rpcCall) appendMeta(b []byte) []byte {
	b = oip.AppendString(oip.AppendString(b, 1, c.ModelName()), 2, c.ModelVersion())
	if c.ID != "" {
		b = oip.AppendString(b, 3, c.ID)
	}
	b = c.Relayed.AppendParameters(b)
	for i := range c.Outputs {
		o := &c.Outputs[i]
		b = oip.AppendTensor(b, o.Name, o.DType, o.Shape...)
	}
	return b
}

// messageSize is the length of the ModelInferResponse.
func (c rpcCall) messageSize() int {
	n := len(c.appendMeta(nil))
	for i := range c.Outputs {
		if o := &c.Outputs[i]; o.Region.Region != nil {
			n += 2
		} else {
			n += 1 + protowire.SizeBytes(o.Size)
		}
	}
	return n
}

func (c rpcCall) smallBytes() int {
	n := 64 * len(c.Outputs)
	for i := range c.Outputs {
		if o := &c.Outputs[i]; o.Region.Region == nil && o.Size < smallAnswer {
			n += o.Size
		}
	}
	return n
}

// Marshal gives the transport the message. The caller's time to read it begins
// here: in a stream it may have waited for the answers before it.
func (a *rpcAnswer) Marshal() mem.BufferSlice {
	if a.call != nil {
		size := 0
		for i := range a.call.Outputs {
			size += a.call.Outputs[i].Size
		}
		a.slow = time.AfterFunc(a.g.AnswerTime(size), func() {
			a.g.Log.Warn("a caller does not read its answer, hung up", "address", a.conn.Peer.Remote)
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
	a.conn.Sending.Add(-1)
	a.g.InFlight.Add(-1)
	a.call.Count(nil)
	a.call.Done()
}

// reportLoad sends the model's load with the answer.
func (c rpcCall) reportLoad(ctx context.Context) {
	if report, wanted := c.LoadReport(); wanted {
		// An error here means that the caller does not wait for the answer any more.
		_ = grpc.SetTrailer(ctx, metadata.MD{oip.LoadTrailer: {string(report.Append(nil))}})
	}
}

// tellSignature adds to a model's metadata what the protocol has no words for:
// how large variable dimensions may be.
func tellSignature(ctx context.Context, k *core.Model) {
	_ = grpc.SetHeader(ctx, metadata.Pairs(oip.SignatureHeader, k.Sig.String()))
}
