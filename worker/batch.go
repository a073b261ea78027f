// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

var errBeyond = fmt.Errorf("%w: mail of sizes beyond the maximum", status.ErrProtocol)

// Batch is the requests to run together, sorted by slot. Goroutines may share it if no
// two write the same row, and none uses it after Complete.
type Batch struct {
	w       *Worker
	id      uint64
	started int64
	mailed  int64
	level   int
	dims    [tensor.MaxVariableDims]uint32
	mails   []shm.MailRequest // a copy of the mail's requests: the broker may overwrite them
	reqs    []request         // sorted by slot
	slots   []uint32          // slot of each row
	steps   []shm.Step        // of each row, if the model has state
	version uint32            // see SetVersion
	rounds  uint32            // see SetRounds
	runs    []Run
	padTo   int
	padding [2][]byte // a padding row to read, to write; nil without Config.Pad

	order   []uint64                         // scratch for sorting
	outDims [][tensor.MaxVariableDims]uint32 // by row; only if outputs have variable dimensions
	shown   []shownRow                       // by row; only if an output grows

	asked   atomic.Uint64   // bit k: the worker has memory of output k to write, for all rows (Column.bit)
	askedOf []atomic.Uint64 // the same, row by row
	ended   atomic.Bool     // answering has begun
	kept    bool            // Serve recycles the batch, not Complete
	mu      sync.Mutex      // guards reasons, and status of reqs
	reasons map[int]string  // texts of failed requests
}

// request is the part of a mail that answering needs; mails[mail] has the rest.
type request struct {
	slot, gen, rows, bell uint32
	row                   uint32 // its first row in the batch
	mail                  uint32
	status                status.Code
	whole                 bool // it failed with its batch: the broker runs it again or ends it
}

// Run is rows that are contiguous in memory.
type Run struct {
	Slot uint32 // of its first row
	Row  int    // its first row in the batch
	Rows int
}

func newBatch(w *Worker) *Batch {
	n := w.session.Info.MaxBatch
	b := &Batch{
		w: w, mails: make([]shm.MailRequest, 0, n), reqs: make([]request, 0, n), slots: make([]uint32, 0, n),
		runs: make([]Run, 0, n), order: make([]uint64, 0, n), askedOf: make([]atomic.Uint64, n),
	}
	if tensor.VariableDims(w.session.Layout.Signature.Outputs) > 0 {
		b.outDims = make([][tensor.MaxVariableDims]uint32, 0, n)
	}
	if w.growing >= 0 {
		b.shown = make([]shownRow, n)
	}
	if w.pads {
		l := w.session.Layout
		for side, planes := range [][]shm.Plane{slices.Concat(l.Inputs, l.State), slices.Concat(l.Outputs, l.State)} {
			largest := slices.MaxFunc(planes, func(a, b shm.Plane) int { return cmp.Compare(a.Stride, b.Stride) })
			b.padding[side] = make([]byte, largest.Stride)
		}
	}
	return b
}

// read copies a mail without the requests that were canceled or have expired meanwhile.
func (b *Batch) read(mail *shm.Mail, reqs []shm.MailRequest) error {
	m := *mail
	layout, board := b.w.session.Layout, b.w.session.Board
	b.id, b.mailed, b.dims, b.padTo, b.reasons = m.Batch, m.Dispatched, m.Dims, int(m.PadTo), nil
	b.level = int(min(m.Level, policy.MaxLevels))
	b.reqs, b.slots, b.runs, b.order, b.outDims = b.reqs[:0], b.slots[:0], b.runs[:0], b.order[:0], b.outDims[:0]
	if int(m.Requests) > len(reqs) {
		return fmt.Errorf("%w: mail of %d requests", status.ErrProtocol, m.Requests)
	}
	most, variable := maxima(layout.Inputs)
	if beyond(m.Dims[:variable], most[:]) {
		return errBeyond
	}
	b.mails = append(b.mails[:0], reqs[:m.Requests]...)
	rows := int64(0)
	for i := range b.mails {
		q := &b.mails[i]
		rows += int64(q.Rows)
		if int64(q.Slot)+int64(q.Rows) > int64(layout.Slots) || int(q.Bell) >= layout.Slots || q.Rows < 1 || rows > int64(len(reqs)) {
			return fmt.Errorf("%w: mail names slot %d of %d", status.ErrProtocol, q.Slot, layout.Slots)
		}
		if beyond(q.Dims[:variable], most[:]) {
			return errBeyond
		}
		if isOpen(board, q.Slot, q.Gen) {
			b.order = append(b.order, uint64(q.Slot)<<32|uint64(i))
		}
	}
	slices.Sort(b.order)
	mostOut, _ := maxima(layout.Outputs)
	for _, key := range b.order {
		i := uint32(key)
		q := &b.mails[i]
		b.reqs = append(b.reqs, request{slot: q.Slot, gen: q.Gen, rows: q.Rows, bell: q.Bell, row: uint32(len(b.slots)), mail: i})
		for s := q.Slot; s < q.Slot+q.Rows; s++ {
			if n := len(b.slots); n > 0 && b.slots[n-1]+1 == s {
				b.runs[len(b.runs)-1].Rows++
			} else {
				b.runs = append(b.runs, Run{Slot: s, Row: n, Rows: 1})
			}
			if b.outDims != nil {
				b.outDims = append(b.outDims, mostOut)
				layout.Ties.Follow(b.outDims[len(b.outDims)-1][:], q.Dims[:])
			}
			b.slots = append(b.slots, s)
		}
	}
	b.beginAttempts()
	b.readSteps()
	b.version, b.rounds = 0, 0
	b.asked.Store(0)
	clear(b.askedOf[:len(b.slots)])
	if b.padTo = max(b.padTo, len(b.slots)); !b.w.pads || b.padTo > shm.MaxBatchRows { // requests that were left out leave no padding
		b.padTo = len(b.slots)
	}
	b.started = shm.Now()
	return nil
}

// beyond reports whether a size is larger than its maximum.
func beyond(dims, most []uint32) bool {
	for j, d := range dims {
		if d > most[j] {
			return true
		}
	}
	return false
}

// isOpen reports whether a request was neither answered nor canceled and has not expired.
func isOpen(board *shm.Board, slot, gen uint32) bool {
	return int32(gen-board.Word(slot).Generation()) > 0
}

// maxima are the largest sizes of the n variable dimensions of some tensors.
func maxima(planes []shm.Plane) (dims [tensor.MaxVariableDims]uint32, n int) {
	for k := range planes {
		for _, v := range planes[k].Spec.Variable {
			dims[n] = uint32(planes[k].Spec.Shape[v])
			n++
		}
	}
	return dims, n
}

// ID is the number of the batch, counted by the model.
func (b *Batch) ID() uint64 { return b.id }

// Len is the number of requests.
func (b *Batch) Len() int { return len(b.reqs) }

// Rows is the number of rows of all requests.
func (b *Batch) Rows() int { return len(b.slots) }

// PadTo is the number of rows to compute: Rows, or more with Config.Pad.
func (b *Batch) PadTo() int { return b.padTo }

// Runs are the contiguous parts, in row order, without padding.
func (b *Batch) Runs() []Run { return b.runs }

// Slots is the slot of each row.
func (b *Batch) Slots() []uint32 { return b.slots }

// Dims are the sizes of the inputs' variable dimensions: of all rows, or if Ragged the
// largest.
func (b *Batch) Dims() []uint32 { return b.dims[:] }

// SetVersion names the version of the weights of the answers; 0: none.
func (b *Batch) SetVersion(v uint32) { b.version = v }

// SetRounds says how many rounds the rows took in their lanes, summed up, for the statistics.
func (b *Batch) SetRounds(n uint32) { b.rounds = n }

// Level is the priority level of the most urgent request.
func (b *Batch) Level() int { return b.level }

// Dispatched is when the broker handed it over, by CLOCK_MONOTONIC.
func (b *Batch) Dispatched() int64 { return b.mailed }

// Ragged reports whether each request keeps its size (InputShape).
func (b *Batch) Ragged() bool { return b.w.session.Settings.Ragged }

// requestOf is the request of a row.
func (b *Batch) requestOf(row int) int {
	i, exact := slices.BinarySearchFunc(b.reqs, row, func(q request, row int) int { return int(q.row) - row })
	if exact {
		return i
	}
	return i - 1
}

// Signature is the model's.
func (b *Batch) Signature() *tensor.Signature { return &b.w.session.Layout.Signature }

// Request describes the i-th request.
func (b *Batch) Request(i int) Request {
	q := &b.reqs[i]
	m := &b.mails[q.mail]
	return Request{Row: int(q.row), Rows: int(q.rows), Deadline: m.Deadline, dims: m.Dims}
}

// Request describes one request of a batch.
type Request struct {
	Row, Rows int
	Deadline  int64 // nanoseconds of CLOCK_MONOTONIC; 0 if none
	dims      [tensor.MaxVariableDims]uint32
}

// Dims are the true sizes of all inputs' variable dimensions.
func (r Request) Dims() []uint32 { return r.dims[:] }

// InputShape is the true shape of request i's rows in the k-th input. With buckets the
// column can be larger: the rest is zero.
func (b *Batch) InputShape(i, k int) []int {
	inputs := b.w.session.Layout.Inputs
	return inputs[k].Spec.Actual(b.mails[b.reqs[i].mail].Dims[:], dimsAt(inputs, k))
}

// dimsAt is the index of the k-th tensor's first variable dimension in its side.
func dimsAt(planes []shm.Plane, k int) int {
	at := 0
	for j := range k {
		at += len(planes[j].Spec.Variable)
	}
	return at
}

// SetOutputDims sets the sizes of the variable dimensions of request i's outputs, in
// signature order. The default is the size of the input dimension that has the same name, or
// the maximum. A row of that shape begins at the start of the
// slot, without gaps.
func (b *Batch) SetOutputDims(i int, dims ...int) error {
	sizes, err := b.checkOutputDims(i, dims)
	for row := b.reqs[i].row; err == nil && row < b.reqs[i].row+b.reqs[i].rows; row++ {
		b.outDims[row] = sizes
	}
	return err
}

// SetRowDims is SetOutputDims for one row of the batch.
func (b *Batch) SetRowDims(row int, dims ...int) error {
	sizes, err := b.checkOutputDims(b.requestOf(row), dims)
	if err == nil {
		b.outDims[row] = sizes
	}
	return err
}

func (b *Batch) checkOutputDims(i int, dims []int) (sizes [tensor.MaxVariableDims]uint32, err error) {
	most, want := maxima(b.w.session.Layout.Outputs)
	if len(dims) != want {
		return sizes, fmt.Errorf("%w: the outputs have %d variable dimensions, %d sizes were given", status.ErrShape, want, len(dims))
	}
	for j, d := range dims {
		if d < 0 || d > int(most[j]) {
			return sizes, fmt.Errorf("%w: variable output dimension %d is 0..%d, got %d", status.ErrShape, j, most[j], d)
		}
		sizes[j] = uint32(d)
	}
	layout := b.w.session.Layout
	return sizes, layout.Ties.CheckOutputs(&layout.Signature, b.mails[b.reqs[i].mail].Dims[:], sizes[:want])
}
