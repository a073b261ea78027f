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

// rpcAnswer is a ModelInferResponse or a ModelStreamInferResponse. The transport
// sends large tensors from the slots; then the call ends.
type rpcAnswer struct {
	oip.Outgoing
	g    *core.Gateway
	conn *core.Conn
	call *core.Call // nil: no tensor is sent from a slot
	left atomic.Int64
	slow *time.Timer // hangs up on a caller that does not read
	part int         // bytes of a part, or of what follows parts; 0: another answer
}

// copied is an answer of a stream that holds no slots.
func (c rpcCall) copied(conn *core.Conn) *rpcAnswer {
	a := &rpcAnswer{g: c.Model.G, conn: conn, part: c.messageSize()}
	b := c.appendMeta(oip.AppendSize(make([]byte, 0, a.part+16), 2, a.part))
	for i := range c.Outputs {
		o := &c.Outputs[i]
		b = oip.AppendSize(b, rawOutputs, o.Size)
		for _, p := range o.Parts {
			b = append(b, p...)
		}
	}
	a.SetOwn(b)
	return a
}

func (a *rpcAnswer) hangUp() {
	a.g.Log.Warn("a caller does not read its answer, hung up", "address", a.conn.Peer.Remote)
	a.conn.Close()
}

func (c rpcCall) encode(conn *core.Conn, stream bool) (*rpcAnswer, error) {
	a := &rpcAnswer{g: c.Model.G, conn: conn}
	head := make([]byte, 0, 128+c.smallBytes())
	if stream {
		head = oip.AppendSize(head, 2, c.messageSize())
	}
	a.SetOwn(c.appendMeta(head))
	for i := range c.Outputs {
		o := &c.Outputs[i]
		a.SetOwn(oip.AppendSize(a.Own(), rawOutputs, o.Size))
		a.AppendSlots(o.Parts)
	}
	if n := a.InPlace(); n > 0 {
		a.call = c.Call
		a.left.Store(int64(n))
		conn.Sending.Add(1)
		a.g.InFlight.Add(1) // until endAnswer
	}
	return a, nil
}

const smallAnswer = 16 << 10 // outputs below this size are copied

const rawOutputs = 6 // raw_output_contents of a ModelInferResponse

// appendMeta writes the fields of a ModelInferResponse before its tensors' contents.
func (c rpcCall) appendMeta(b []byte) []byte {
	b = oip.AppendString(oip.AppendString(b, 1, c.ModelName()), 2, c.ModelVersion())
	if c.ID != "" {
		b = oip.AppendString(b, 3, c.ID)
	}
	b = append(b, c.Parameters...)
	if v := c.WeightsVersion(); v > 0 {
		b = oip.AppendNumber(b, "weights_version", v)
	}
	for i := range c.Outputs {
		o := &c.Outputs[i]
		b = oip.AppendTensor(b, o.Name, o.DType, o.Shape...)
	}
	return b
}

func (c rpcCall) messageSize() int {
	n := len(c.appendMeta(nil))
	for i := range c.Outputs {
		n += 1 + protowire.SizeBytes(c.Outputs[i].Size)
	}
	return n
}

func (c rpcCall) smallBytes() int {
	n := 64 * len(c.Outputs)
	for i := range c.Outputs {
		if o := &c.Outputs[i]; o.Size < smallAnswer {
			n += o.Size
		}
	}
	return n
}

// Marshal gives the transport the message. The caller's time to read it begins.
func (a *rpcAnswer) Marshal() mem.BufferSlice {
	if a.call != nil {
		size := 0
		for i := range a.call.Outputs {
			size += a.call.Outputs[i].Size
		}
		a.slow = time.AfterFunc(a.g.AnswerTime(size), a.hangUp) // the only way to make the transport free the slots
	}
	return a.Outgoing.Marshal(a.free)
}

// free counts pieces that the transport has sent.
func (a *rpcAnswer) free(n int) {
	if a.left.Add(-int64(n)) == 0 {
		a.endAnswer()
	}
}

func (a *rpcAnswer) drop() {
	if a.call != nil {
		a.endAnswer()
	}
}

func (a *rpcAnswer) endAnswer() {
	if a.slow != nil {
		a.slow.Stop()
	}
	a.conn.Sending.Add(-1)
	a.g.InFlight.Add(-1)
	a.call.Count(nil)
	a.call.Done()
}

func (c rpcCall) reportLoad(ctx context.Context) {
	if report, wanted := c.LoadReport(); wanted {
		_ = grpc.SetTrailer(ctx, metadata.MD{oip.LoadTrailer: {string(report.Append(nil))}})
	}
}

// sendSignature adds the signature to a model's metadata: the protocol cannot say
// how large variable dimensions may be.
func sendSignature(ctx context.Context, k *core.Model) {
	_ = grpc.SetHeader(ctx, metadata.Pairs(oip.SignatureHeader, k.Sig.String()))
}
