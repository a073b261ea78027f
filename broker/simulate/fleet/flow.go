// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

func (w *world) handle(e event) {
	switch e.kind {
	case comes:
		w.come()
	case frontDue:
		if f := &w.fronts[e.index]; f.wake == e.at {
			f.wake = batcher.Never
			w.decideFront(int(e.index))
		}
	case hostDue:
		if h := &w.hosts[e.index]; h.wake == e.at && h.life == e.life {
			h.wake = batcher.Never
			w.decideHost(int(e.index))
		}
	case delivers:
		w.deliver(e.parcel)
	case computed:
		w.done(e)
	case returns:
		w.answered(e.parcel)
	case reports:
		w.report()
	case fails:
		w.fail(int(e.index))
	case recovers:
		w.recover(int(e.index))
	case givenUp:
		w.resend(e.parcel)
	}
}

// report has all hosts tell their load. Reports that nothing can come between,
// and would all say the same, are left out: an outage may last for a day.
func (w *world) report() {
	for i := range w.hosts {
		w.hosts[i].told = w.hosts[i].rows
	}
	next := w.cfg.Stale
	if !w.events.empty() {
		next *= max(1, time.Duration(w.events.next()-w.now-1)/w.cfg.Stale)
	}
	w.after(next, event{kind: reports})
}

// come has one request committed at a front, and the next one on its way.
func (w *world) come() {
	i := w.rng.IntN(len(w.fronts))
	f := &w.fronts[i]
	var id batcher.RequestID
	if n := len(f.free); n > 0 {
		id = f.free[n-1]
		f.free = f.free[:n-1]
	} else {
		id = batcher.RequestID(len(f.arrived))
		f.arrived = append(f.arrived, 0)
	}
	f.arrived[id] = w.now
	if err := f.b.Arrive(w.now, batcher.Request{ID: id, Rows: 1, Level: batcher.DefaultLevel, Arrived: w.now, Deadline: batcher.Never}); err != nil {
		panic(err) // nothing that it could refuse
	}
	w.decideFront(i)
	if w.sent++; w.sent < w.cfg.Requests {
		w.after(w.gap(), event{kind: comes})
	}
}

// decideFront sends what a front's batcher decides.
func (w *world) decideFront(i int) {
	f := &w.fronts[i]
	d := f.b.Decide(w.now)
	for k := range d.Dispatches {
		p := &parcel{front: int32(i), batch: d.Dispatches[k].Batch, requests: slices.Clone(d.Dispatches[k].Requests)}
		w.send(p)
	}
	if d.Wake < f.wake {
		f.wake = d.Wake
		w.events.push(event{at: d.Wake, kind: frontDue, index: int32(i)})
	}
}

// send puts a parcel on the network, to the host that the route chooses.
func (w *world) send(p *parcel) {
	if w.up == 0 {
		w.lost = append(w.lost, p)
		return
	}
	f := &w.fronts[p.front]
	host := w.choose(f)
	h := &w.hosts[host]
	p.host, p.life, p.left, p.sent = int32(host), h.life, len(p.requests), w.now
	f.inFlight[host]++
	h.rows += len(p.requests)
	w.after(w.cfg.Network, event{kind: delivers, parcel: p})
}

func (w *world) deliver(p *parcel) {
	h := &w.hosts[p.host]
	if h.down || h.life != p.life {
		w.after(w.cfg.Detect, event{kind: givenUp, parcel: p})
		return
	}
	for range p.requests {
		var id batcher.RequestID
		if n := len(h.free); n > 0 {
			id = h.free[n-1]
			h.free = h.free[:n-1]
		} else {
			id = batcher.RequestID(len(h.parts))
			h.parts = append(h.parts, nil)
		}
		h.parts[id] = p
		if err := h.b.Arrive(w.now, batcher.Request{ID: id, Rows: 1, Level: batcher.DefaultLevel, Arrived: w.now, Deadline: batcher.Never}); err != nil {
			panic(err)
		}
	}
	w.decideHost(int(p.host))
}

func (w *world) decideHost(i int) {
	h := &w.hosts[i]
	d := h.b.Decide(w.now)
	for k := range d.Dispatches {
		x := &d.Dispatches[k]
		took := w.cfg.Cost.Of(x.Rows)
		w.busy += took
		w.batches++
		w.rows += x.Rows
		h.running[x.Batch] = slices.Clone(x.Requests)
		if second := int64(time.Duration(w.now).Seconds()); h.used != second {
			h.used = second
			w.seconds[second]++
		}
		w.after(took, event{kind: computed, index: int32(i), life: h.life, worker: x.Worker, batch: x.Batch, started: w.now})
	}
	if d.Wake < h.wake {
		h.wake = d.Wake
		w.events.push(event{at: d.Wake, kind: hostDue, index: int32(i), life: h.life})
	}
}

// done has a host's batch answered; a parcel goes back with its last answer.
func (w *world) done(e event) {
	h := &w.hosts[e.index]
	if h.life != e.life {
		return
	}
	for _, id := range h.running[e.batch] {
		p := h.parts[id]
		h.parts[id] = nil
		h.free = append(h.free, id)
		h.rows--
		if p.left--; p.left == 0 {
			w.after(w.cfg.Network, event{kind: returns, parcel: p})
		}
	}
	delete(h.running, e.batch)
	h.b.BatchDone(e.worker, e.batch, e.started, w.now)
	w.decideHost(int(e.index))
}

func (w *world) answered(p *parcel) {
	f := &w.fronts[p.front]
	f.inFlight[p.host]--
	for _, id := range p.requests {
		w.latencies = append(w.latencies, float32(time.Duration(w.now-f.arrived[id]).Seconds()))
		f.free = append(f.free, id)
		w.ended++
	}
	f.b.BatchDone(0, p.batch, p.sent, w.now)
	w.decideFront(int(p.front))
}

// fail loses everything that a host has.
func (w *world) fail(i int) {
	h := &w.hosts[i]
	lost := map[*parcel]bool{}
	for _, p := range h.parts {
		if p != nil && !lost[p] {
			lost[p] = true
		}
	}
	h.life++
	if err := w.boot(i); err != nil {
		panic(err)
	}
	w.hosts[i].down = true
	w.up--
	for _, p := range sorted(lost) {
		w.after(w.cfg.Detect, event{kind: givenUp, parcel: p})
	}
	w.after(w.cfg.Outage, event{kind: recovers, index: int32(i)})
	w.after(w.cfg.Outage+w.healthy(), event{kind: fails, index: int32(i)})
}

// recover has a host back, and what waited for one sent.
func (w *world) recover(i int) {
	w.hosts[i].down = false
	w.up++
	waiting := w.lost
	w.lost = nil
	for _, p := range waiting {
		w.send(p)
	}
}

// sorted makes the order of a map the same in every run.
func sorted(lost map[*parcel]bool) (list []*parcel) {
	for p := range lost {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b *parcel) int {
		if a.front != b.front {
			return int(a.front - b.front)
		}
		return int(a.batch) - int(b.batch)
	})
	return list
}

func (w *world) resend(p *parcel) {
	w.resent++
	w.fronts[p.front].inFlight[p.host]--
	w.send(p)
}

// choose is the relay's rule. A host that is down is known as such.
func (w *world) choose(f *front) int {
	n := len(w.hosts)
	up := func(i int) bool { return !w.hosts[i].down }
	anyone := func() int {
		for range 4 * n {
			if i := w.rng.IntN(n); up(i) {
				return i
			}
		}
		return w.rng.IntN(n)
	}
	capacity := w.cfg.Workers * w.cfg.MaxBatch
	switch w.cfg.Route {
	case RoundRobin:
		for range n {
			if f.turn = (f.turn + 1) % n; up(f.turn) {
				return f.turn
			}
		}
	case TwoChoices:
		a, b := anyone(), anyone()
		if f.inFlight[b] < f.inFlight[a] {
			return b
		}
		return a
	case LeastRequest:
		f.turn = (f.turn + 1) % n
		best := -1
		for k := range n {
			if i := (f.turn + k) % n; up(i) && (best < 0 || f.inFlight[i] < f.inFlight[best]) {
				best = i
				if f.inFlight[i] == 0 {
					break
				}
			}
		}
		if best >= 0 {
			return best
		}
	case Weighted:
		sum := 0.0
		for i := range w.hosts {
			if up(i) {
				sum += w.room(i, capacity)
			}
		}
		at := w.rng.Float64() * sum
		for i := range w.hosts {
			if up(i) {
				if at -= w.room(i, capacity); at <= 0 {
					return i
				}
			}
		}
	case Fill:
		best, least := -1, 0
		for i := range w.hosts {
			if !up(i) {
				continue
			}
			load := w.known(i) + int(f.inFlight[i])*w.cfg.MaxBatch
			if load < capacity { // a batch that is running, and none behind it
				return i
			}
			if best < 0 || load < least {
				best, least = i, load
			}
		}
		if best >= 0 {
			return best
		}
	}
	return anyone()
}

// known is a host's load as the relay knows it.
func (w *world) known(i int) int {
	if w.cfg.Stale == 0 {
		return w.hosts[i].rows
	}
	return w.hosts[i].told
}

// room is a host's weight: what it has free, and a little, so that a full host
// is not forgotten.
func (w *world) room(i, capacity int) float64 {
	return max(1-float64(w.known(i))/float64(2*capacity), 0.02)
}
