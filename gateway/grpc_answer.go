// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"runtime"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// rpcAnswer is a ModelInferResponse, or with stream a ModelStreamInferResponse.
// Large tensors are sent from the slots: the transport tells by freeing their
// buffers when it is done with them, and then the call ends. It does not do so
// for what it still had to send when a connection broke; then the garbage
// collector tells, by the ticket that only those buffers hold.
type rpcAnswer struct {
	g       *Gateway
	conn    *conn
	head    []byte // everything, or everything up to the first large tensor
	tails   [][]byte
	inPlace [][]byte // large tensors; tails[i] follows inPlace[i]
	call    *call    // nil if nothing is in place
	left    atomic.Int32
	slow    *time.Timer // hangs up on a caller that does not read
}

// Tensors below this size are copied into the message. (The transport does not
// tell about buffers of up to 1 KiB.)
const inPlaceBytes = 8 << 10

// encode makes the answer of a call that went well, and ends the call, at once
// or when its tensors have been sent.
func (c *call) encode(conn *conn, stream bool) (*rpcAnswer, error) {
	a := &rpcAnswer{g: c.model.g, conn: conn}
	if err := c.writeRegions(); err != nil {
		return nil, err
	}
	head := make([]byte, 0, 128+c.smallBytes())
	if stream {
		head = protowire.AppendTag(head, 2, protowire.BytesType)
		head = protowire.AppendVarint(head, uint64(c.messageSize()))
	}
	head = c.appendMeta(head)
	for i := range c.outputs {
		o := &c.outputs[i]
		head = protowire.AppendTag(head, 6, protowire.BytesType)
		if o.region.region != nil { // one entry for each output all the same
			head = append(head, 0)
			continue
		}
		head = protowire.AppendVarint(head, uint64(o.size))
		for _, p := range o.parts {
			if len(p) < inPlaceBytes {
				head = append(head, p...)
				continue
			}
			if a.inPlace == nil {
				a.head = head
			} else {
				a.tails = append(a.tails, head)
			}
			a.inPlace = append(a.inPlace, p[:len(p):len(p)])
			head = nil
		}
	}
	if a.inPlace == nil {
		a.head = head
		return a, nil
	}
	a.tails = append(a.tails, head)
	a.call = c
	a.conn.sending.Add(1)
	a.g.inFlight.Add(1) // until it is sent
	a.left.Store(int32(len(a.inPlace)))
	return a, nil
}

// appendMeta writes the fields of a ModelInferResponse up to its tensors.
func (c *call) appendMeta(b []byte) []byte {
	text := func(field protowire.Number, s string) {
		b = protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
	}
	text(1, c.modelName())
	text(2, c.modelVersion())
	if c.id != "" {
		text(3, c.id)
	}
	b = c.relayed.appendParameters(b)
	for i := range c.outputs {
		o := &c.outputs[i]
		dims := 0
		for _, d := range o.shape {
			dims += protowire.SizeVarint(uint64(d))
		}
		datatype := TypeName(o.dtype)
		size := 3 + protowire.SizeBytes(len(o.name)) + protowire.SizeBytes(len(datatype)) + protowire.SizeBytes(dims)
		b = protowire.AppendVarint(protowire.AppendTag(b, 5, protowire.BytesType), uint64(size))
		text(1, o.name)
		text(2, datatype)
		b = protowire.AppendVarint(protowire.AppendTag(b, 3, protowire.BytesType), uint64(dims))
		for _, d := range o.shape {
			b = protowire.AppendVarint(b, uint64(d))
		}
	}
	return b
}

// messageSize is the length of the ModelInferResponse.
func (c *call) messageSize() int {
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

func (c *call) smallBytes() int {
	n := 64 * len(c.outputs)
	for i := range c.outputs {
		if o := &c.outputs[i]; o.region.region == nil && o.size < 2*inPlaceBytes {
			n += o.size
		}
	}
	return n
}

// ticket is what the buffers of one answer have in common: as their pool, it
// hears of each that is freed.
type ticket struct{ answer *rpcAnswer }

// marshal gives the transport the message.
func (a *rpcAnswer) marshal() mem.BufferSlice {
	out := mem.BufferSlice{mem.SliceBuffer(a.head)}
	if a.inPlace == nil {
		return out
	}
	// The caller's time to read it begins here: in a stream it may have waited
	// for the answers before it.
	size := 0
	for _, p := range a.inPlace {
		size += len(p)
	}
	a.slow = time.AfterFunc(a.g.answerTime(size), func() {
		a.g.log.Warn("a caller does not read its answer, hung up", "address", a.conn.peer.remote)
		a.conn.Close() // only that makes the transport let go of the slots
	})
	t := &ticket{a}
	runtime.AddCleanup(t, (*rpcAnswer).drop, a)
	for i := range a.inPlace {
		out = append(out, mem.NewBuffer(&a.inPlace[i], t))
		if len(a.tails[i]) > 0 {
			out = append(out, mem.SliceBuffer(a.tails[i]))
		}
	}
	return out
}

// Get is there because mem.BufferPool asks for it.
func (*ticket) Get(int) *[]byte { panic("gateway: an answer is no pool") }

// Put is how the transport says that it is done with a tensor.
func (t *ticket) Put(*[]byte) {
	if t.answer.left.Add(-1) == 0 {
		t.answer.end()
	}
}

// drop ends an answer that nobody sends any more.
func (a *rpcAnswer) drop() {
	if a.left.Swap(0) > 0 {
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
