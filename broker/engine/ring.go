// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"log/slog"
	"sync"

	"github.com/ringbatch/ringbatch/shm"
)

// Ring is the memory of one model and the broker's books about it: segments,
// board, windows, slots, and the clients that commit into them. The ring knows when
// a request is legal and who owns a slot; its stages decide when and where a request
// runs. Only its loop touches it.
type Ring struct {
	loop    *Loop
	name    string
	log     *slog.Logger
	create  func(name string, size int64) (*shm.Segment, error)
	epoch   uint64
	layout  *shm.Layout
	planes  *shm.Segment
	bseg    *shm.Segment
	boardRO int // descriptor of the board that cannot be mapped for writing
	board   *shm.Board
	device  DeviceMemory
	closed  bool

	books    [][]slotInfo     // in chunks, made when one of their slots is leased; see slot
	base     uint32           // the generation before the next client's first: later than any used one
	unread   []*ClientSession // clients in line for their turn
	inLine   bool             // on the loop's list of rings to visit
	windows  windows
	leased   map[int]int // slots, by user
	share    int         // percent of the slots that one user may have
	clients  map[*ClientSession]struct{}
	troubles map[uint32]*trouble // by first slot: requests that are run again
	held     int                 // requests that ended while a worker had them
	rows     [4]int              // slots, by their state

	clearing sync.WaitGroup // private windows that are being cleared

	// A request passes the stages one after the other, in the same slots. Most models
	// have one stage. slotInfo.stage is the stage that has a request.
	stages     []*Stage
	isPipeline bool
	whole      *stageStats // of a pipeline, as its clients see it; else nil

	sessionEnded func()
}

// RingSpec describes a ring to be made.
type RingSpec struct {
	Name      string
	Layout    *shm.Layout                                         // as clients see it
	Create    func(name string, size int64) (*shm.Segment, error) // shm.Create
	Epoch     uint64
	UserShare int // percent of the slots that one user may have
	Log       *slog.Logger
	Pipeline  bool        // a stage's name differs from the ring's
	Stages    []StageSpec // in the order in which requests pass them
	// SessionEnded is called when a client's window is free again, or a worker is gone.
	SessionEnded func()
}

// NewRing makes a ring and its stages. It may take long, so it is not called on a loop.
// The caller has checked that there is memory for it.
func NewRing(spec *RingSpec) (*Ring, error) {
	r := &Ring{
		name: spec.Name, log: spec.Log, create: spec.Create, epoch: spec.Epoch, layout: spec.Layout, boardRO: -1,
		device: DeviceMemory{FD: -1}, isPipeline: spec.Pipeline, sessionEnded: spec.SessionEnded, share: spec.UserShare,
		books:   make([][]slotInfo, (spec.Layout.Slots+chunkSlots-1)/chunkSlots),
		windows: newWindows(spec.Layout.Slots), clients: map[*ClientSession]struct{}{},
		leased: map[int]int{}, troubles: map[uint32]*trouble{},
	}
	r.rows[idle] = spec.Layout.Slots
	if err := r.addStages(spec.Stages); err != nil {
		return nil, err
	}
	if err := r.createMemory(); err != nil {
		r.Close()
		return nil, fmt.Errorf("model %q: %w", spec.Name, err)
	}
	return r, nil
}

func (r *Ring) addStages(specs []StageSpec) error {
	if r.isPipeline {
		r.whole = &stageStats{}
		r.whole.init(0)
	}
	for i := range specs {
		s, err := newStage(r, &specs[i])
		if err != nil {
			return fmt.Errorf("model %q: %w", specs[i].Name, err)
		}
		if i > 0 {
			r.stages[i-1].next = s
		}
		r.stages = append(r.stages, s)
	}
	return nil
}

func (r *Ring) createMemory() (err error) {
	if r.planes, err = r.create("planes-"+r.name, r.layout.PlanesSize); err != nil {
		return err
	}
	if r.bseg, err = r.create("board-"+r.name, r.layout.BoardSize); err != nil {
		return err
	}
	if r.boardRO, err = r.bseg.ReadOnlyFD(); err != nil {
		return err
	}
	r.layout.WriteHeader(r.planes, shm.KindPlanes, r.epoch)
	r.layout.WriteHeader(r.bseg, shm.KindBoard, r.epoch)
	r.board = shm.NewBoard(r.layout, r.bseg)
	return nil
}

// SetLoop gives the ring to a loop, before peers can reach the ring.
func (r *Ring) SetLoop(l *Loop) {
	r.loop = l
	for _, s := range r.stages {
		s.loop = l
	}
}

// Stages are the ring's stages, in the order in which requests pass them.
func (r *Ring) Stages() []*Stage { return r.stages }

// Do runs f on the ring's loop and waits for it; false if the ring is gone.
func (r *Ring) Do(f func()) bool {
	there := false
	return r.loop.Do(func() {
		if there = !r.closed; there {
			f()
		}
	}) && there
}

// Close gives back the memory, and the sessions of clients that are still attached.
func (r *Ring) Close() {
	r.closed = true
	for c := range r.clients {
		c.closeSession(r.loop)
	}
	r.closeMemory()
}

// closeMemory may take long: the kernel frees the pages that no peer has any more.
func (r *Ring) closeMemory() {
	r.clearing.Wait()
	if r.planes != nil {
		r.planes.Close()
	}
	if r.bseg != nil {
		r.bseg.Close()
	}
	CloseFD(r.boardRO)
	r.boardRO = -1
	if r.device.FD >= 0 {
		r.device.closeAside()
	}
}
