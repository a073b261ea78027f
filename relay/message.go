// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/encoding"
	encproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/ringbatch/ringbatch/gateway"
	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/internal/relaywire"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// codec sends tensors from the slots, and leaves those of answers where the
// transport has put them.
type codec struct{ usual encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(encproto.Name)} }

func (c codec) Name() string { return encproto.Name }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if m, ok := v.(*message); ok {
		return m.marshal(), nil
	}
	return c.usual.Marshal(v)
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if a, ok := v.(*answer); ok {
		data.Ref()
		a.data = data
		return nil
	}
	return c.usual.Unmarshal(data, v)
}

// message is a ModelInferRequest of some requests of a batch.
type message struct {
	parts  []part
	leases *atomic.Int64 // buffers that the transport still has of slots
}

// part is memory of the message's own, or a piece of slots.
type part struct {
	bytes  []byte
	inSlot bool
}

// Pieces of slots below this size are copied into the message. (The transport
// does not tell about buffers of up to 1 KiB.)
const inPlaceBytes = 8 << 10

// encode makes the message of some requests of a batch.
func (r *relay) encode(b *worker.Batch, requests []int, plain bool) *message {
	m := &message{leases: &r.leases}
	sig := &b.Layout().Signature
	rows := 0
	for _, i := range requests {
		rows += b.Request(i).Rows
	}
	head := make([]byte, 0, 512)
	text := func(to []byte, field protowire.Number, s string) []byte {
		return protowire.AppendString(protowire.AppendTag(to, field, protowire.BytesType), s)
	}
	head = text(head, 1, r.cfg.Remote)
	if r.levels > 1 {
		head = appendParameter(head, "priority", protowire.AppendVarint(protowire.AppendTag(nil, 2, protowire.VarintType), uint64(b.Level()+1)))
	}
	if !plain {
		list := describe(b, requests, tensor.VariableDims(sig.Inputs))
		head = appendParameter(head, relaywire.Requests, protowire.AppendBytes(protowire.AppendTag(nil, 3, protowire.BytesType), list))
	}
	for k := range sig.Inputs {
		spec := &sig.Inputs[k]
		in := text(nil, 1, spec.Name)
		in = text(in, 2, gateway.TypeName(spec.DType))
		dims := protowire.AppendVarint(nil, uint64(rows))
		for _, d := range largest(b, requests, k) {
			dims = protowire.AppendVarint(dims, uint64(d))
		}
		in = protowire.AppendBytes(protowire.AppendTag(in, 3, protowire.BytesType), dims)
		head = protowire.AppendBytes(protowire.AppendTag(head, 5, protowire.BytesType), in)
	}
	for k := range sig.Inputs {
		pieces, size := inputs(b, requests, k)
		head = protowire.AppendVarint(protowire.AppendTag(head, 7, protowire.BytesType), uint64(size))
		head = slices.Grow(head, copied(pieces))
		for _, p := range pieces {
			if len(p) < inPlaceBytes {
				head = append(head, p...)
				continue
			}
			m.parts = append(m.parts, part{bytes: head}, part{bytes: p[:len(p):len(p)], inSlot: true})
			head = nil
		}
	}
	if len(head) > 0 {
		m.parts = append(m.parts, part{bytes: head})
	}
	return m
}

// copied is how many bytes of the pieces are copied.
func copied(pieces [][]byte) (n int) {
	for _, p := range pieces {
		if len(p) < inPlaceBytes {
			n += len(p)
		}
	}
	return n
}

func appendParameter(b []byte, key string, value []byte) []byte {
	entry := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), key)
	entry = protowire.AppendBytes(protowire.AppendTag(entry, 2, protowire.BytesType), value)
	return protowire.AppendBytes(protowire.AppendTag(b, 4, protowire.BytesType), entry)
}

// describe tells which rows are a request, and how long each may still take.
func describe(b *worker.Batch, requests []int, sizes int) (list []byte) {
	now := shm.Now()
	for _, i := range requests {
		q := b.Request(i)
		var left time.Duration
		if q.Deadline > 0 {
			left = max(time.Microsecond, time.Duration(q.Deadline-now))
		}
		list = relaywire.AppendRequest(list, q.Rows, left, q.Dims()[:sizes])
	}
	return list
}

// largest is the smallest row shape of input k that holds every request's.
func largest(b *worker.Batch, requests []int, k int) []int {
	shape := slices.Clone(b.InputShape(requests[0], k))
	for _, i := range requests[1:] {
		for d, n := range b.InputShape(i, k) {
			shape[d] = max(shape[d], n)
		}
	}
	return shape
}

// inputs are the pieces of input k, each request in its own true sizes.
func inputs(b *worker.Batch, requests []int, k int) (pieces [][]byte, size int) {
	col := b.Input(k)
	spec := col.Spec()
	if len(spec.Variable) == 0 {
		if len(requests) == b.Len() { // the runs are as long as can be
			pieces = make([][]byte, 0, len(b.Runs()))
			for i := range b.Runs() {
				pieces = append(pieces, col.RunBytes(i))
			}
		} else {
			for _, i := range requests {
				q := b.Request(i)
				for row := q.Row; row < q.Row+q.Rows; row++ {
					pieces = append(pieces, col.Bytes(row))
				}
			}
		}
	} else {
		for _, i := range requests {
			q, shape := b.Request(i), b.InputShape(i, k)
			n := spec.DType.Size()
			for _, d := range shape {
				n *= d
			}
			for row := q.Row; row < q.Row+q.Rows; row++ {
				bytes := col.Bytes(row)
				if !b.Ragged() && !slices.Equal(shape, col.RowShape()) { // in a larger bucket
					own := make([]byte, n)
					pad.Corner(own, bytes, shape, col.RowShape(), spec.DType.Size())
					bytes = own
				}
				pieces = append(pieces, bytes[:n])
			}
		}
	}
	for _, p := range pieces {
		size += len(p)
	}
	return pieces, size
}

// lease is what the buffers of one sending of a message have in common: as
// their pool, it hears of each that the transport frees. Of what the transport
// forgets, when a connection breaks, the garbage collector tells.
type lease struct{ left *leaseCount }

type leaseCount struct {
	all  *atomic.Int64
	mine atomic.Int64
}

func (c *leaseCount) drop() { c.all.Add(-c.mine.Swap(0)) }

// marshal gives the transport the message.
func (m *message) marshal() (out mem.BufferSlice) {
	count := &leaseCount{all: m.leases}
	for i := range m.parts {
		if m.parts[i].inSlot {
			count.mine.Add(1)
		}
	}
	n := count.mine.Load()
	m.leases.Add(n)
	l := &lease{count}
	if n > 0 {
		runtime.AddCleanup(l, (*leaseCount).drop, count)
	}
	for i := range m.parts {
		if p := &m.parts[i]; p.inSlot {
			out = append(out, mem.NewBuffer(&p.bytes, l))
		} else if len(p.bytes) > 0 {
			out = append(out, mem.SliceBuffer(p.bytes))
		}
	}
	return out
}

// Get is there because mem.BufferPool asks for it.
func (*lease) Get(int) *[]byte { panic("relay: a lease is no pool") }

// Put is how the transport says that it is done with a piece.
func (l *lease) Put(*[]byte) {
	for {
		n := l.left.mine.Load()
		if n == 0 {
			return
		}
		if l.left.mine.CompareAndSwap(n, n-1) {
			l.left.all.Add(-1)
			return
		}
	}
}

// groups cuts requests into those that can share a message: all of them, if
// the far side is a ringbatch gateway and has refused none for its size (maxBytes
// is 0). Another server wants one shape, and no more rows than its batches have.
func groups(b *worker.Batch, requests []int, plain bool, maxRows, maxBytes int) [][]int {
	if !plain && maxBytes == 0 {
		return [][]int{requests}
	}
	type group struct{ at, rows, bytes int }
	var all [][]int
	open := map[string]group{} // of each shape
	for _, i := range requests {
		shape, rows, bytes := "", b.Request(i).Rows, tensorBytes(b, []int{i})
		if plain {
			shape = shapesOf(b, i)
		}
		g, ok := open[shape]
		if !ok || plain && g.rows+rows > maxRows || maxBytes > 0 && g.bytes+bytes > maxBytes {
			g = group{at: len(all)}
			all = append(all, nil)
		}
		all[g.at] = append(all[g.at], i)
		open[shape] = group{g.at, g.rows + rows, g.bytes + bytes}
	}
	return all
}

// shapesOf is equal for requests whose inputs have the same shapes.
func shapesOf(b *worker.Batch, request int) string {
	var key strings.Builder
	for k := range b.Layout().Inputs {
		fmt.Fprint(&key, b.InputShape(request, k))
	}
	return key.String()
}

// tensorBytes is what the inputs of requests have, in their true sizes.
func tensorBytes(b *worker.Batch, requests []int) (size int) {
	for k := range b.Layout().Inputs {
		for _, i := range requests {
			n := b.Input(k).Spec().DType.Size() * b.Request(i).Rows
			for _, d := range b.InputShape(i, k) {
				n *= d
			}
			size += n
		}
	}
	return size
}
