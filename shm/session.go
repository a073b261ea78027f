// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"fmt"
	"sync/atomic"

	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
)

// The parts of a session segment.
//
// Client session:
//
//	0      64          192           256       4096
//	+------+-----------+-------------+--- … ---+----------- … -----------+----------- … -----------+
//	|header| ringWords | recordWords |         | Commit × ring capacity  | Times × 2 × window      |
//	+------+-----------+-------------+--- … ---+----------- … -----------+----------- … -----------+
//	                                                                      times.go; if both sides support it
//
// Worker session:
//
//	0      64          192         384       4096
//	+------+-----------+-----------+--- … ---+------ … -----+------- … -------+
//	|header| ringWords | mailWords |         | Done × ring  | mail × depth    |
//	+------+-----------+-----------+--- … ---+------ … -----+------- … -------+
//	                                          a mail = Mail + MailRequest × max batch

// CommitKind distinguishes a commit from a cancel.
type CommitKind uint8

const (
	KindCommit CommitKind = 1
	KindCancel CommitKind = 2
	KindStream CommitKind = 3 // a commit whose client takes parts
)

// Commit is the client's message "slots Slot … Slot+Rows-1 hold a request".
type Commit struct {
	Kind      CommitKind
	Level     int8   // priority level; -1 is the model's default
	Cost      uint16 // of a row, as the client says; 0: by its size
	Rows      uint32
	Slot      uint32
	Gen       uint32
	Deadline  int64 // on Now's clock; 0 if none
	Committed int64
	Dims      [tensor.MaxVariableDims]uint32
}

// Mail is the broker's message "run this batch".
type Mail struct {
	Batch      uint64
	Dispatched int64
	Requests   uint32
	Rows       uint32
	PadTo      uint32                         // rows to compute, with padding; at least Rows
	Level      uint32                         // priority level of its most urgent request
	Dims       [tensor.MaxVariableDims]uint32 // the shape they share (bucketed)
}

// MailRequest is one request of a mail.
type MailRequest struct {
	Slot, Gen, Rows uint32
	Bell            uint32 // slot of its client's bell
	Deadline        int64
	Committed       int64
	Dims            [tensor.MaxVariableDims]uint32 // its true sizes
}

// Done is the worker's message "this batch is done".
type Done struct {
	Batch    uint64
	Started  int64
	Finished int64
	Failed   uint32 // requests
	Whole    uint32 // 1: the batch failed as a whole; the broker runs its open requests again, or ends them
}

// ringWords control one direction of a session.
type ringWords struct {
	// Written by the producer.
	Tail atomic.Uint64 // entries ever pushed
	_    [56]byte
	// Written by the consumer.
	Head    atomic.Uint64 // entries ever taken
	ArmedAt atomic.Uint64 // "ring my doorbell when Tail moves on from here"
	_       [48]byte
}

// mailWords control a worker's mailbox.
type mailWords struct {
	// Written by the broker.
	Tail atomic.Uint64 // mails ever posted
	_    [48]byte
	Bell atomic.Uint32 // +1 for every mail, and for "look at your socket"
	_    uint32
	// Written by the worker.
	Taken  atomic.Uint64 // mails ever taken: the suspects if the worker dies
	Parked atomic.Uint32 // 1 while it waits on Bell
	Lanes  atomic.Uint32 // batches to run at once from now on; 0: as when it attached
	Rounds atomic.Uint64 // of all rows that it has answered; for statistics
	_      [40]byte
	_      [64]byte
}

const (
	ringWordsAt = 64
	mailWordsAt = 192
)

// commitRingSize is the capacity of the ring for a window. The ring may hold a stale
// cancel, a commit and its cancel for each slot.
func commitRingSize(window int) int { return ceilPow2(4 * window) }

func timesAt(window int) int64 { return segmentHeader + int64(commitRingSize(window))*64 }

// ClientSegmentSize is the size of a client's session segment, with or without
// ClientTimes.
func ClientSegmentSize(window int, times bool) int64 {
	end := timesAt(window)
	if times {
		end += int64(window) * 128
	}
	return roundUp(end, pageSize)
}

// CommitRing views a client's session.
func CommitRing(s *Segment, window int) Ring[Commit] {
	n := commitRingSize(window)
	return Ring[Commit]{words: at[ringWords](s.mem, ringWordsAt), entries: array[Commit](s.mem, segmentHeader, n)}
}

// doneRingSize is the capacity of the ring of Done entries.
func doneRingSize(depth int) int { return ceilPow2(2 * depth) }

func mailSize(maxBatch int) int64 { return 64 + 64*int64(maxBatch) }

func mailsAt(depth int) int64 {
	return roundUp(segmentHeader+int64(doneRingSize(depth))*32, cacheLine)
}

// WorkerSegmentSize is the size of a worker's session segment.
func WorkerSegmentSize(depth, maxBatch int) int64 {
	return roundUp(mailsAt(depth)+int64(depth)*mailSize(maxBatch), pageSize)
}

// DoneRing views the worker-to-broker half of a worker's session.
func DoneRing(s *Segment, depth int) Ring[Done] {
	return Ring[Done]{words: at[ringWords](s.mem, ringWordsAt), entries: array[Done](s.mem, segmentHeader, doneRingSize(depth))}
}

// Mailbox is the broker-to-worker half.
type Mailbox struct {
	*mailWords
	depth int
	mails []mailView
}

type mailView struct {
	mail     *Mail
	requests []MailRequest
}

// NewMailbox views a worker's session.
func NewMailbox(s *Segment, depth, maxBatch int) *Mailbox {
	m := &Mailbox{mailWords: at[mailWords](s.mem, mailWordsAt), depth: depth, mails: make([]mailView, depth)}
	for i := range m.mails {
		off := mailsAt(depth) + int64(i)*mailSize(maxBatch)
		m.mails[i] = mailView{at[Mail](s.mem, off), array[MailRequest](s.mem, off+64, maxBatch)}
	}
	return m
}

// At is the memory of the n-th mail ever posted.
func (m *Mailbox) At(n uint64) (*Mail, []MailRequest) {
	v := &m.mails[n%uint64(m.depth)]
	return v.mail, v.requests
}

// Post publishes mail number n and wakes the worker if it is parked. Only the broker
// calls it, after it has written the mail.
//
// SYNC POINT "mail", release side.
func (m *Mailbox) Post(n uint64) {
	m.Tail.Store(n + 1)
	m.Poke()
}

// Poke makes a parked worker look again.
//
// In test/model: Poke.
func (m *Mailbox) Poke() {
	m.Bell.Add(1)
	if m.Parked.Load() != 0 {
		futexWakeOne(wordOf(&m.Bell))
	}
}

func ceilPow2(n int) int {
	p := 1
	for p < n {
		p *= 2
	}
	return p
}

// Ring is one direction of a session: a ring of fixed-size entries with a producer in
// one process and a consumer in another.
type Ring[T any] struct {
	words   *ringWords
	entries []T
}

// Producer is the side that pushes. Its position is in private memory, where the other
// side cannot overwrite it.
type Producer[T any] struct {
	Ring[T]
	tail uint64
}

// Push appends an entry. If ring, the consumer sleeps until this entry comes: ring its
// doorbell. If full, nothing was written.
//
// SYNC POINT "entry", release side: a consumer that sees the new Tail sees the entry,
// and everything written before Push.
//
// In test/model: Store, then RingIfArmed.
func (p *Producer[T]) Push(e *T) (ring, full bool) {
	if p.tail-p.words.Head.Load() >= uint64(len(p.entries)) {
		return false, true
	}
	p.entries[p.tail&uint64(len(p.entries)-1)] = *e
	p.tail++
	// Store Tail, then load ArmedAt; the consumer stores ArmedAt, then loads Tail. Both
	// are sequentially consistent, so one side sees the other. (Swap costs as much as
	// Store, and is a full barrier even under the race detector, where a Store to
	// mapped memory is only a release.)
	p.words.Tail.Swap(p.tail)
	return p.words.ArmedAt.Load() == p.tail-1, false
}

// Leave is the producer's last call before it hangs up. The end of the connection orders
// the producer's writes before the consumer's next use of the memory. The race
// detector does not know sockets; it sees the same order in this word.
//
// SYNC POINT "leave", release side; Pending is the acquire side.
func (p *Producer[T]) Leave() { p.words.Tail.Add(0) }

// Consumer is the side that takes.
type Consumer[T any] struct {
	Ring[T]
	head uint64
}

// NewConsumer starts at the beginning of a fresh ring, not armed.
func NewConsumer[T any](r Ring[T]) Consumer[T] {
	r.words.ArmedAt.Store(^uint64(0))
	return Consumer[T]{Ring: r}
}

// Pending is the number of entries to take. An impossible number is an error: the
// producer broke the protocol.
//
// SYNC POINT "entry", acquire side.
func (c *Consumer[T]) Pending() (int, error) {
	n := c.words.Tail.Load() - c.head
	if n > uint64(len(c.entries)) {
		return 0, fmt.Errorf("%w: ring tail is %d entries ahead of %d", status.ErrProtocol, n, len(c.entries))
	}
	return int(n), nil
}

// Take copies the next entry. Precondition: Pending has returned more than 0.
func (c *Consumer[T]) Take(e *T) {
	*e = c.entries[c.head&uint64(len(c.entries)-1)]
	c.head++
}

// Give lets the producer overwrite the entries taken so far.
func (c *Consumer[T]) Give() { c.words.Head.Store(c.head) }

// Arm asks the producer to ring when the next entry comes. It returns false if an entry
// is there already.
//
// In test/model: ArmStore, then ArmLoad.
func (c *Consumer[T]) Arm() bool {
	c.words.ArmedAt.Swap(c.head) // a full barrier, as in Push
	return c.words.Tail.Load() == c.head
}
