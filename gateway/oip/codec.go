// SPDX-License-Identifier: Apache-2.0

package oip

import (
	"runtime"
	"sync/atomic"

	"google.golang.org/grpc/encoding"
	encproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// Codec leaves the tensors of a Received message where the transport has put
// them, and sends those of an Outgoing message from where they lie. Every other
// message goes the usual way.
type Codec struct{ usual encoding.CodecV2 }

// NewCodec makes a codec for both ends of a connection.
func NewCodec() Codec { return Codec{encoding.GetCodecV2(encproto.Name)} }

// Name is that of the usual codec: callers need not know of this one.
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

// Outgoing is an encoded message. Some of its pieces lie in slots.
type Outgoing struct {
	parts   [][]byte
	inPlace []bool // of each part
	slots   int
}

// Pieces of slots below this size are copied into the message. (The transport
// does not say when it is done with buffers of up to 1 KiB.)
const inPlaceBytes = 8 << 10

// Own returns memory of the message's own to append to; SetOwn puts it back.
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

// InPlace counts the pieces that lie in slots.
func (m *Outgoing) InPlace() int { return m.slots }

// Marshal gives the transport the message. For each piece in place that the
// transport is done with, freed is called. The transport forgets what it still
// had to send when a connection breaks; then the garbage collector finds those
// pieces, and freed hears of them together.
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

// piecesLeft counts the pieces that the transport still has.
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

// piecePool is the pool of all pieces of one sending.
type piecePool struct{ left *piecesLeft }

// Get is there because mem.BufferPool asks for it.
func (*piecePool) Get(int) *[]byte { panic("oip: a message is no pool") }

// Put is how the transport says that it is done with a piece.
func (p *piecePool) Put(*[]byte) { p.left.freeOne() }
