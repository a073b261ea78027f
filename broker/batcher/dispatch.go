// SPDX-License-Identifier: Apache-2.0

package batcher

// dispatch packs the queue of shape s, in order and up to limit rows and MaxBatchCost,
// into a batch for w.
func (b *Batcher) dispatch(w WorkerID, s int32, limit int, why Reason, now Time) {
	dims := b.shapes.shapes[s].dims
	slot, x := b.newBatch()
	before := len(b.ids)
	rows, cost := b.pack(s, slot, limit, now)
	if b.settings.PreserveOrder {
		for id := x.requests.head; id != none; id = b.inQueue[id].next {
			b.hold(&b.clients[b.requests[id].client])
		}
	}
	b.handOver(w, slot, Dispatch{Requests: b.ids[before:], Rows: rows, Cost: cost, Dims: dims, Why: why}, now)
}

// pack moves requests of shape s to the batch slot: always the first of the
// queue, until one does not fit.
func (b *Batcher) pack(s, slot int32, limit int, now Time) (rows, cost int) {
	sh := &b.shapes.shapes[s]
	x := &b.batches[slot]
	heads := uint64(0)
	for sh.levels != 0 && rows < limit {
		id := b.list(s, b.firstLevel(s, now)).head
		r := &b.requests[id]
		if rows+int(r.rows) > limit || rows > 0 && b.isTooCostly(cost+int(r.cost)) {
			break
		}
		rows += int(r.rows)
		cost += int(r.cost)
		heads |= b.withdrawUnfiled(id)
		b.start(r, x, slot, id)
	}
	b.refile(s, heads)
	return rows, cost
}

// isTooCostly says whether a batch of several requests may not have this cost.
func (b *Batcher) isTooCostly(cost int) bool {
	return b.settings.MaxBatchCost > 0 && cost > b.settings.MaxBatchCost
}

// start makes id, which was just withdrawn, a running request of a batch.
func (b *Batcher) start(r *request, x *batch, slot int32, id RequestID) {
	r.state = running
	r.batch = slot
	b.clients[r.client].running++
	b.inQueue.insertAfter(&x.requests, x.requests.tail, id)
	b.ids = append(b.ids, id)
}

// handOver gives the batch to w, and adds it to the decisions.
func (b *Batcher) handOver(w WorkerID, slot int32, d Dispatch, now Time) {
	x := &b.workers[w]
	d.Worker = w
	d.Batch = b.batches[slot].id
	d.PadTo = padTo(&b.settings, &x.Worker, d.Rows)
	x.batches = append(x.batches, slot)
	x.cost, b.batches[slot].cost = x.cost+d.Cost, d.Cost
	x.alone = x.Lanes > 1 && b.requests[d.Requests[0]].ranWithDead()
	x.pass += int64(d.Rows) * passScale / int64(x.Share)
	b.fileWorker(w)
	b.out.Dispatches = append(b.out.Dispatches, d)
	b.advisor.BatchSent(now, d)
}
