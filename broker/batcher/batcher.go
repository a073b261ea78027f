// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"errors"
	"math"
)

// Time is a point on a monotonic clock, in nanoseconds. The batcher only compares and adds
// times; it has no clock.
type Time int64

// Never is the "no deadline" and "nothing to wake up for" time.
const Never Time = math.MaxInt64

// RequestID, ClientID and WorkerID are small dense numbers, because the batcher indexes arrays
// with them. The broker uses the request's first slot, the first slot of the client's window,
// and the worker's index. The caller may use an id again once the request has ended, the client has
// left, or the worker is gone.
type (
	RequestID uint32
	ClientID  uint32
	WorkerID  uint32
	BatchID   uint64
)

// MaxVariableDims bounds the variable dimensions of all inputs together.
const MaxVariableDims = 8

// Dims are the actual sizes of a request's variable dimensions, in the order
// of the model's signature; unused entries are zero. Requests with equal Dims
// (or, with Buckets, equal bucketed Dims) may share a batch; others never do.
type Dims [MaxVariableDims]uint32

// Request describes one request to the batcher.
type Request struct {
	ID       RequestID
	Client   ClientID
	Rows     int  // 1..MaxBatchSize, never split
	Level    int  // priority level, 0 is the most urgent; DefaultLevel asks for Settings.DefaultPriority
	Arrived  Time // when the client committed it; the wait time counts from here
	Deadline Time // when it ends wherever it is; Never if none
	Dims     Dims
	Cost     int // of each row, which counts against MaxBatchCost; 0: the size of Dims[Settings.Cost], at least 1
	// Share, if not 0, makes the request a retry: its last batch killed its worker or failed as
	// a whole, and a single request may be to blame. A retry goes out before everything
	// else, in a batch of at most Share requests; 1 is alone.
	Share int
	// Avoid is the worker that should not get this retry if there is another
	// one; NoWorker: none.
	Avoid WorkerID
}

// NoWorker is no worker's id.
const NoWorker WorkerID = math.MaxUint32

// DefaultLevel as Request.Level means "the model's default level".
const DefaultLevel = -1

// Worker describes one worker when it attaches.
type Worker struct {
	ID    WorkerID
	Share int     // of the work, relative to other workers; 0 means 1
	Lanes int     // batches it runs at once: it is idle while it holds fewer; 0 means 1
	Depth int     // batches it may hold at once, running and prefetched; 0 means 1
	Pad   Padding // padding it asks for
	PadTo int     // with PadFixed: the size, ≥ the batch

	Paused  bool // it gets no batches
	Doubted bool // it gets no retries while a worker without doubts could
}

// Padding is how a worker with a static engine wants its batches padded.
type Padding uint8

const (
	PadNone      Padding = iota
	PadFixed             // every batch is padded to Worker.PadTo rows
	PadPreferred         // … to the next preferred size, or MaxBatchSize
)

// Dispatch is one batch for one worker.
type Dispatch struct {
	Worker   WorkerID
	Batch    BatchID     // 1, 2, 3 … in dispatch order
	Requests []RequestID // in queue order; valid until the next Decide
	Rows     int         // sum of the requests' rows
	Cost     int         // sum of the rows' costs
	PadTo    int         // rows the worker should see, ≥ Rows; equal to Rows without padding
	Dims     Dims        // the shape all requests share (bucketed sizes where buckets are declared)
	Why      Reason
}

// Reason says which rule sent a batch out.
type Reason uint8

const (
	Full      Reason = iota // no more fits
	Preferred               // a preferred size was ready
	Deadline                // the wait time of the oldest is over
	Nobody                  // no other client could join
	Retry                   // retries
	Alone                   // of a client in debt
)

func (r Reason) String() string {
	return [...]string{"full", "preferred", "deadline", "nobody", "retry", "alone"}[r]
}

// End is a waiting request that ended without a batch.
type End struct {
	ID  RequestID
	Why EndReason
}

// EndReason says why a request ended in the queue.
type EndReason uint8

const (
	Expired  EndReason = iota // its own deadline passed
	TimedOut                  // its level's queue timeout passed, with Reject
)

func (r EndReason) String() string { return [...]string{"expired", "timed out"}[r] }

// Decisions are the result of Decide. The next Decide reuses the slices.
type Decisions struct {
	Dispatches []Dispatch
	Ended      []End
	// Wake is when Decide must be called again at the latest, if no event
	// comes first; Never if only an event can change anything.
	Wake Time
}

// Errors of Arrive. The request is not queued, nothing else changed.
var (
	ErrTooLarge  = errors.New("request has more rows than max_batch_size")
	ErrQueueFull = errors.New("queue of this priority level is full")
	ErrNoLevel   = errors.New("no such priority level")
	ErrTooLong   = errors.New("variable dimension larger than its largest bucket")
	ErrExpired   = errors.New("deadline has passed already")
	ErrNoRows    = errors.New("request has no rows")
	ErrInUse     = errors.New("request id is in use")
	ErrLate      = errors.New("request could not be answered in time")
)
