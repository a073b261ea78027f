// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"fmt"
	"log/slog"
	"sync"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// ring is the memory of one model and the broker's books about it: segments,
// board, windows, slots, and the clients that commit into them. It knows when
// a request is legal and who owns a slot; when and where it runs is its stage's
// business. Only its loop touches it.
type ring struct {
	loop    *loop
	log     *slog.Logger
	memory  shm.Memory
	epoch   uint64
	layout  *shm.Layout
	planes  *shm.Segment
	bseg    *shm.Segment
	boardRO int // descriptor of the board that cannot be mapped for writing
	board   *shm.Board
	device  deviceMemory
	closed  bool

	books    [][]slotInfo     // in chunks, made when a slot of them is leased; see slot
	base     uint32           // generation from which the next client's slots start: later than any that a former one used
	unread   []*clientSession // those whose turn comes, in this order
	inLine   bool             // on its loop's list of rings to visit
	windows  windows
	leased   map[int]int // slots, by user
	limits   Limits
	clients  map[*clientSession]struct{}
	troubles map[uint32]*trouble // by first slot: requests that are run again
	held     int                 // requests that ended while a worker had them
	rows     [4]int              // slots, by their state

	clearing sync.WaitGroup // windows that are cleared before they are free

	// stages are where requests run, one after the other in the same slots; most
	// models have one. slotInfo.stage says which one has a request.
	stages     []*stage
	isPipeline bool
	whole      *stageStats // of a pipeline: what its clients see of it; else nil

	// vacated is called each time a session has ended for good: a client's
	// window is free again, or a worker is gone.
	vacated func()
}

// newRing makes the segments. It may take a while, and is not done on a loop
// that serves others. Whether there is room for them was checked before.
func newRing(name string, layout *shm.Layout, memory shm.Memory, epoch uint64, log *slog.Logger) (*ring, error) {
	r := &ring{
		log: log, memory: memory, epoch: epoch, layout: layout, boardRO: -1, device: deviceMemory{fd: -1},
		books: make([][]slotInfo, (layout.Slots+chunkSlots-1)/chunkSlots), windows: newWindows(layout.Slots), clients: map[*clientSession]struct{}{},
		leased: map[int]int{}, troubles: map[uint32]*trouble{}, limits: Limits{UserShare: 100},
	}
	r.rows[idle] = layout.Slots
	var err error
	if r.planes, err = memory.Create("planes-"+name, layout.PlanesSize); err == nil {
		if r.bseg, err = memory.Create("board-"+name, layout.BoardSize); err == nil {
			r.boardRO, err = r.bseg.ReadOnlyFD()
		}
	}
	if err != nil {
		r.close()
		return nil, fmt.Errorf("model %q: %w", name, err)
	}
	layout.WriteHeader(r.planes, shm.KindPlanes, epoch)
	layout.WriteHeader(r.bseg, shm.KindBoard, epoch)
	r.board = shm.NewBoard(layout, r.bseg)
	return r, nil
}

// close gives the memory back, and the sessions of those who are still there.
func (r *ring) close() {
	r.closed = true
	for c := range r.clients {
		c.close(r.loop)
	}
	r.closeMemory()
}

// closeMemory may take long: it is the last who has the pages that gives them
// back.
func (r *ring) closeMemory() {
	r.clearing.Wait()
	if r.planes != nil {
		r.planes.Close()
	}
	if r.bseg != nil {
		r.bseg.Close()
	}
	closeFD(r.boardRO)
	r.boardRO = -1
	if r.device.fd >= 0 {
		r.device.closeAside()
	}
}

// end tells a request's client how it ended. held says that a worker may
// still write into its slots.
func (r *ring) end(head uint32, s status.Code, reason string, held bool) {
	info := r.slot(head)
	if reason != "" {
		r.board.SetReason(head, reason)
	}
	switch ended, w := r.board.End(head, info.gen, s, held), r.board.Word(head); {
	case ended:
		info.stage.ended(s)
	case w.Generation() == info.gen: // its worker was quicker
		info.stage.answered(info, w.Status())
	default:
		r.log.Warn("a word of the board was damaged", "slot", head, "word", w.String(), "generation", info.gen)
		r.board.Repair(head, info.gen, s, held)
		info.stage.ended(s)
	}
	if !info.client.left {
		r.board.Ring(info.client.first)
	}
}

// endRunning releases the caller of a request that a worker has: the slots are
// held until that worker is done with its batch.
//
// In docs/model: EndRunning.
func (r *ring) endRunning(head uint32, s status.Code) {
	r.end(head, s, "", true)
	r.setState(head, held)
	r.held++
}

// reclaim gives the slots of a request that ended early back to its client.
//
// In docs/model: Reclaim.
func (r *ring) reclaim(head uint32) {
	info := r.slot(head)
	if !info.client.left {
		r.board.Reclaim(head, info.gen)
		r.board.Ring(info.client.first)
	}
	r.free(head)
}
