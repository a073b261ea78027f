package broker

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// model is one ring with everything that belongs to it. Only the loop touches
// it.
type model struct {
	b       *Broker
	cfg     ModelConfig
	log     *slog.Logger
	layout  *shm.Layout
	planes  *shm.Segment
	bseg    *shm.Segment
	boardRO int // descriptor of the board that cannot be mapped for writing
	board   *shm.Board

	batcher *batcher.Batcher
	slots   []slotInfo
	windows windows
	clients map[*clientSession]struct{}
	workers []*workerSession // by worker id; nil where unused
	wake    int64            // when the batcher wants to be asked again
	arrived int64            // when the last request came
	dirty   bool             // something happened since the last decision
	held    int              // requests that ended while a worker had them
	dynamic bool             // declared by a worker: goes with its last peer

	runningDeadline int64 // not later than the earliest deadline of a running request
	since           time.Time
	stats           modelStats
}

func (b *Broker) newModel(cfg ModelConfig) (*model, error) {
	layout, err := cfg.fill()
	if err != nil {
		return nil, err
	}
	bat, err := batcher.New(cfg.Policy)
	if err != nil {
		return nil, fmt.Errorf("model %q: %w: %w", cfg.Name, status.ErrInvalid, err)
	}
	if err := checkMemory(layout.PlanesSize + layout.BoardSize); err != nil {
		return nil, fmt.Errorf("model %q: %w; lower its slots (now %d of %d bytes)", cfg.Name, err, cfg.Slots, layout.SlotBytes())
	}
	m := &model{
		b: b, cfg: cfg, log: b.log.With("model", cfg.Name), layout: layout, boardRO: -1, batcher: bat, wake: never, runningDeadline: never,
		slots: make([]slotInfo, layout.Slots), windows: windows{make([]bool, layout.Slots)},
		clients: map[*clientSession]struct{}{}, since: time.Now(),
	}
	m.stats.init(cfg.Policy.MaxBatchSize)
	if m.planes, err = b.cfg.Memory.Create("planes-"+cfg.Name, layout.PlanesSize); err != nil {
		return nil, fmt.Errorf("model %q: %w", cfg.Name, err)
	}
	if m.bseg, err = b.cfg.Memory.Create("board-"+cfg.Name, layout.BoardSize); err != nil {
		m.close()
		return nil, fmt.Errorf("model %q: %w", cfg.Name, err)
	}
	if m.boardRO, err = m.bseg.ReadOnlyFD(); err != nil {
		m.close()
		return nil, fmt.Errorf("model %q: %w", cfg.Name, err)
	}
	layout.WriteHeader(m.planes, shm.KindPlanes, b.epoch)
	layout.WriteHeader(m.bseg, shm.KindBoard, b.epoch)
	m.board = shm.NewBoard(layout, m.bseg)
	m.log.Info("model ready", "signature", layout.Signature.String(), "slots", layout.Slots,
		"max_batch_size", cfg.Policy.MaxBatchSize, "wait_time", cfg.Policy.WaitTime, "bytes", layout.PlanesSize)
	return m, nil
}

func (m *model) close() {
	if m.planes != nil {
		m.planes.Close()
	}
	if m.bseg != nil {
		m.bseg.Close()
	}
	closeFD(m.boardRO)
}

// end tells a request's client how it ended. held says that a worker may
// still write into its slots.
func (m *model) end(head uint32, s status.Code, reason string, held bool) {
	info := &m.slots[head]
	if reason != "" {
		m.board.SetReason(head, reason)
	}
	if !m.board.End(head, info.gen, s, held) {
		if w := m.board.Word(head); w.Generation() == info.gen {
			s = w.Status() // its worker was quicker
		} else {
			m.log.Warn("a word of the board was damaged", "slot", head, "word", w.String(), "generation", info.gen)
			m.board.Repair(head, info.gen, s, held)
		}
	}
	m.stats.ended(s)
	if !info.client.left {
		m.board.Ring(info.client.first)
	}
}

// idleNow reports whether nothing is queued or running.
func (m *model) idleNow() bool {
	if m.batcher.Queued() > 0 {
		return false
	}
	for _, w := range m.workers {
		if w != nil && len(w.mails) > 0 {
			return false
		}
	}
	return true
}
