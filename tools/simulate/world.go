// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/broker/batcher"
)

// world is one simulation in progress.
type world struct {
	cfg     Config
	b       *auto.Batcher
	workers []simulatedWorker
	rng     *rand.Rand
	now     batcher.Time
	events  eventQueue
	flights []flight // by RequestID
	free    []batcher.RequestID
	shares  []float64 // LevelShares, added up

	scheduled  int          // commits so far, past and future
	commitTime batcher.Time // of the last commit that was scheduled in turn
	turn       int
	burstEnd   batcher.Time // Bursty

	stats    stats
	answered func(committed, answered batcher.Time) // called for each answer, if set
}

// endOfTime is where the virtual clock stops, after 36 years. The sum of a few such times does not overflow.
const endOfTime batcher.Time = 1 << 60

// flight is a request between its commit and its answer.
type flight struct {
	committed, deadline batcher.Time
	client              batcher.ClientID
	rows, level, cost   int
	rounds              int
}

// simulatedWorker runs its batches one after the other.
type simulatedWorker struct {
	freeAt batcher.Time // when it has finished all its batches
	busy   batcher.Time
	rows   int
	given  [][]batcher.RequestID // batches that it holds, oldest first
	total  int                   // batches so far
	lanes  *laneWorker           // nil: whole batches
}

func newWorld(cfg Config) (*world, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	w := &world{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x72696e67)), stats: newStats(&cfg)}
	sum := 0.0
	for _, share := range cfg.Load.LevelShares {
		sum += share
		w.shares = append(w.shares, sum)
	}
	var err error
	if w.b, err = auto.NewBatcher(cfg.Policy); err != nil {
		return nil, err
	}
	for c := range cfg.Arrivals.clients() {
		w.b.ClientJoined(batcher.ClientID(c))
	}
	w.workers = make([]simulatedWorker, cfg.Workers.Count)
	for k := range w.workers {
		if cfg.Workers.Lanes > 0 {
			w.workers[k].lanes = &laneWorker{}
		}
		w.b.WorkerReady(batcher.Worker{ID: batcher.WorkerID(k), Depth: cfg.Workers.Depth, Lanes: cfg.Workers.Lanes, Pad: cfg.Workers.Pad, PadTo: cfg.Workers.PadTo})
	}
	return w, nil
}

// run plays events in the order of time. The batcher gets all events of one moment before it decides.
func (w *world) run(ctx context.Context) error {
	w.cfg.Arrivals.begin(w)
	wake := batcher.Never
	for n := 0; ; n++ {
		if n%4096 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		next := min(wake, w.events.next())
		if next == batcher.Never {
			break
		}
		if next > endOfTime {
			years := time.Duration(endOfTime) / (365 * 24 * time.Hour)
			return bad("it takes more than %d years: raise the rate, or lower the times or the requests", years)
		}
		w.now = next
		for w.events.next() == next {
			w.handle(w.events.pop())
		}
		wake = w.decide()
	}
	if w.b.Queued() > 0 {
		return errors.New("some requests are never served") // a bug of the batcher
	}
	return nil
}

// phase is the phase at a time.
func (w *world) phase(at batcher.Time) Phase {
	p := Phase{Rate: 1, Cost: 1}
	for _, next := range w.cfg.Phases {
		if batcher.Time(next.From) <= at {
			p = next
		}
	}
	return p
}

// rateNow is the rate of the phase at the last commit.
func (w *world) rateNow() float64 { return w.phase(w.commitTime).Rate }

func (w *world) handle(e *event) {
	if e.number > 0 {
		w.arrive(e)
		return
	}
	if e.round {
		w.goRound(e.worker)
		return
	}
	w.b.BatchDone(e.worker, e.batch, e.started, e.finished)
	x := &w.workers[e.worker]
	w.free = append(w.free, x.given[0]...)
	x.given = slices.Delete(x.given, 0, 1)
}

// commitAt schedules the commit of one more request, unless all have been sent. The broker sees
// the request one hop later.
func (w *world) commitAt(at batcher.Time, c batcher.ClientID) {
	if w.scheduled == w.cfg.Requests {
		return
	}
	w.scheduled++
	w.commitTime = at
	w.events.push(event{at: at + batcher.Time(w.cfg.Hop), client: c, number: uint32(w.scheduled), started: at})
}

// nextInTurn spreads requests over n clients.
func (w *world) nextInTurn(n int) batcher.ClientID {
	w.turn = (w.turn + 1) % n
	return batcher.ClientID(w.turn)
}
