// SPDX-License-Identifier: Apache-2.0

package batcher

import (
	"math/rand/v2"
	"testing"
)

// The count of batches before a request is what packing the queue one by one gives.
func TestAQueueIsDividedIntoBatchesAsItWillBePacked(t *testing.T) {
	const most = 32
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var p packing
		var queue []int // rows
		rows := 0
		take := func() { // a full batch goes out
			taken := 0
			for len(queue) > 0 && taken+queue[0] <= most {
				taken += queue[0]
				queue = queue[1:]
			}
			rows -= taken
			p.dispatched(&Dispatch{Rows: taken, Why: Full})
		}
		for range 2000 {
			next := 1 + rng.IntN(4)
			before, own := 0, 0
			for _, x := range append(queue[:len(queue):len(queue)], next) {
				if own+x > most {
					before, own = before+1, 0
				}
				own += x
			}
			gotBefore, gotOwn := p.put(next, rows, most)
			if p.seen == packingMemory && (gotBefore != before || gotOwn != own) {
				t.Fatalf("seed %d: %d batches before, %d rows in the own; want %d, %d", seed, gotBefore, gotOwn, before, own)
			}
			p.arrived(next, rows, most)
			queue = append(queue, next)
			rows += next
			if rows > 3*most {
				take()
			}
			if rng.IntN(200) == 0 { // all that waits fits into one batch, and goes out
				for rows > most {
					take()
				}
				queue, rows = queue[:0], 0
			}
		}
	}
}

// Requests that leave the queue otherwise do not make it look shorter by a batch.
func TestWhatLeavesTheQueueDoesNotHideABatch(t *testing.T) {
	const most = 32
	var p packing
	rows := 0
	for range 40 {
		p.arrived(1, rows, most)
		rows++
	}
	rows -= 20 // canceled
	for range 20 {
		p.arrived(1, rows, most)
		rows++
	}
	if before, own := p.put(1, rows, most); before != 1 || own != 9 {
		t.Errorf("%d batches before, %d rows in the own; want 1 and 9", before, own)
	}
}
