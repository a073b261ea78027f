// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"runtime"
	"sync/atomic"

	"google.golang.org/grpc/encoding"
	encproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Codec keeps the tensors of a received Request or Response in the transport's
// buffers, and sends the tensors of an Outgoing message from the slots. Other
// messages go through the usual codec.
type Codec struct{ usual encoding.CodecV2 }

// NewCodec makes a codec for both ends of a connection.
func NewCodec() Codec { return Codec{encoding.GetCodecV2(encproto.Name)} }

// Name returns the usual codec's name, which callers know.
func (c Codec) Name() string { return encproto.Name }

// Marshal gives the transport a message.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	if m, ok := v.(interface{ Marshal() mem.BufferSlice }); ok {
		return m.Marshal(), nil
	}
	return c.usual.Marshal(v)
}

// Unmarshal takes a message from the transport.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(interface{ Receive(mem.BufferSlice) }); ok {
		data.Ref()
		m.Receive(data)
		return nil
	}
	return c.usual.Unmarshal(data, v)
}

// Outgoing is an encoded message in pieces, some of them in slots.
type Outgoing struct {
	parts   [][]byte
	inPlace []bool // of each part
	slots   int
}

// Smaller pieces of slots are copied into the message. (The transport never frees
// buffers of up to 1 KiB.)
const inPlaceBytes = 8 << 10

// Own returns the message's memory to append to; SetOwn puts it back.
func (m *Outgoing) Own() []byte {
	if n := len(m.parts); n > 0 && !m.inPlace[n-1] {
		return m.parts[n-1]
	}
	return nil
}

// SetOwn ends the message with b, which began as Own.
func (m *Outgoing) SetOwn(b []byte) {
	if n := len(m.parts); n > 0 && !m.inPlace[n-1] {
		m.parts[n-1] = b
		return
	}
	m.parts, m.inPlace = append(m.parts, b), append(m.inPlace, false)
}

// AppendSlots appends pieces of slots: small ones by copying, others in place.
func (m *Outgoing) AppendSlots(pieces [][]byte) {
	for _, p := range pieces {
		if len(p) < inPlaceBytes {
			m.SetOwn(append(m.Own(), p...))
			continue
		}
		m.parts, m.inPlace = append(m.parts, p[:len(p):len(p)]), append(m.inPlace, true)
		m.slots++
	}
}

// InPlace counts the pieces in slots.
func (m *Outgoing) InPlace() int { return m.slots }

// Marshal gives the transport the message. freed is called for each piece in place
// that the transport has sent. When a connection breaks, the transport forgets the
// rest; then the garbage collector, which runs every two minutes at least, frees
// those pieces together.
func (m *Outgoing) Marshal(freed func(n int)) mem.BufferSlice {
	left := &piecesLeft{freed: freed}
	left.n.Store(int64(m.slots))
	pool := &piecePool{left}
	if m.slots > 0 {
		runtime.AddCleanup(pool, (*piecesLeft).freeAll, left)
	}
	out := make(mem.BufferSlice, 0, len(m.parts))
	for i := range m.parts {
		if m.inPlace[i] {
			out = append(out, mem.NewBuffer(&m.parts[i], pool))
		} else if len(m.parts[i]) > 0 {
			out = append(out, mem.SliceBuffer(m.parts[i]))
		}
	}
	return out
}

type piecesLeft struct {
	n     atomic.Int64
	freed func(n int)
}

func (l *piecesLeft) freeAll() {
	if n := l.n.Swap(0); n > 0 {
		l.freed(int(n))
	}
}

func (l *piecesLeft) freeOne() {
	for n := l.n.Load(); n > 0; n = l.n.Load() {
		if l.n.CompareAndSwap(n, n-1) {
			l.freed(1)
			return
		}
	}
}

// piecePool is a mem.BufferPool whose Put receives the sent pieces.
type piecePool struct{ left *piecesLeft }

// Get is part of mem.BufferPool, and never called.
func (*piecePool) Get(int) *[]byte { panic("oip: a message is no pool") }

// Put frees a piece.
func (p *piecePool) Put(*[]byte) { p.left.freeOne() }
