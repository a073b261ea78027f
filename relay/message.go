// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/mem"

	"github.com/ringbatch/ringbatch/gateway/oip"
	"github.com/ringbatch/ringbatch/internal/pad"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// message is a ModelInferRequest of some requests of a batch.
type message struct {
	oip.Outgoing
	leases *atomic.Int64 // pieces of slots that the transport holds
}

const rawInputs = 7 // raw_input_contents of a ModelInferRequest

func (r *relay) encode(b *worker.Batch, requests []int, plain bool) *message {
	m := &message{leases: &r.leases}
	sig := b.Signature()
	rows := 0
	for _, i := range requests {
		rows += b.Request(i).Rows
	}
	head := oip.AppendString(make([]byte, 0, 512), 1, r.cfg.Remote)
	if r.levels > 1 {
		head = oip.AppendNumber(head, "priority", uint64(b.Level()+1))
	}
	if !plain {
		head = oip.AppendText(head, oip.RequestsParameter, describe(b, requests, tensor.VariableDims(sig.Inputs)))
	}
	for k := range sig.Inputs {
		spec := &sig.Inputs[k]
		head = oip.AppendTensor(head, spec.Name, spec.DType, append([]int{rows}, oip.WireRow(spec, largest(b, requests, k))...)...)
	}
	m.SetOwn(head)
	for k := range sig.Inputs {
		pieces, size := inputs(b, requests, k)
		m.SetOwn(oip.AppendSize(m.Own(), rawInputs, size))
		m.AppendSlots(pieces)
	}
	return m
}

// Marshal gives the transport the message, and counts its slots until they are freed.
func (m *message) Marshal() mem.BufferSlice {
	m.leases.Add(int64(m.InPlace()))
	return m.Outgoing.Marshal(func(n int) { m.leases.Add(-int64(n)) })
}

// describe writes the rows and the remaining time of each request.
func describe(b *worker.Batch, requests []int, sizes int) (list []byte) {
	now := shm.Now()
	for _, i := range requests {
		q := b.Request(i)
		var left time.Duration
		if q.Deadline > 0 {
			left = max(time.Microsecond, time.Duration(q.Deadline-now))
		}
		list = oip.AppendRequest(list, q.Rows, left, q.Dims()[:sizes])
	}
	return list
}

// largest returns the smallest row shape of input k that holds every request's.
func largest(b *worker.Batch, requests []int, k int) []int {
	shape := slices.Clone(b.InputShape(requests[0], k))
	for _, i := range requests[1:] {
		for d, n := range b.InputShape(i, k) {
			shape[d] = max(shape[d], n)
		}
	}
	return shape
}

// inputs returns the pieces of input k, each request in its true sizes.
func inputs(b *worker.Batch, requests []int, k int) (pieces [][]byte, size int) {
	col := b.Input(k)
	spec := col.Spec()
	if len(spec.Variable) == 0 {
		if len(requests) == b.Len() {
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
	if spec.DType == tensor.Str {
		pieces = encodeTexts(spec, pieces)
	}
	for _, p := range pieces {
		size += len(p)
	}
	return pieces, size
}

// encodeTexts copies texts as elements of BYTES. What a broken client wrote instead of one is empty.
func encodeTexts(spec *tensor.Spec, pieces [][]byte) [][]byte {
	var all []byte
	for _, p := range pieces {
		for text := range slices.Chunk(p, spec.TextBytes()) {
			var err error
			if all, err = oip.AppendTexts(all, spec, text); err != nil {
				all = append(all, 0, 0, 0, 0)
			}
		}
	}
	return [][]byte{all}
}

// groups divides requests into messages. A gateway takes all requests in one
// message, up to maxBytes (0: no limit is known). Another server takes one shape,
// and at most maxRows.
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

// shapesOf returns a key of the shapes of a request's inputs.
func shapesOf(b *worker.Batch, request int) string {
	var key strings.Builder
	for k := range b.Signature().Inputs {
		fmt.Fprint(&key, b.InputShape(request, k))
	}
	return key.String()
}

// tensorBytes returns the size of the requests' inputs.
func tensorBytes(b *worker.Batch, requests []int) (size int) {
	for k := range b.Signature().Inputs {
		for _, i := range requests {
			n := b.Input(k).Spec().DType.Size() * b.Request(i).Rows
			for _, d := range b.InputShape(i, k) {
				n *= d
			}
			if spec := b.Input(k).Spec(); spec.DType == tensor.Str {
				n += 4 * n / spec.TextBytes() // their lengths
			}
			size += n
		}
	}
	return size
}
