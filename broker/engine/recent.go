// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
)

// recentBatches is how many of a model's last batches are remembered.
const recentBatches = 1024

// recent is the last finished batches. Its memory is made with the first of them.
type recent struct {
	ring  []batchRecord
	count uint64 // ever
}

type batchRecord struct {
	worker                    int32
	rows, requests            uint32
	posted, started, finished int64
}

func (r *recent) addBatch(b batchRecord) {
	if r.ring == nil {
		r.ring = make([]batchRecord, recentBatches)
	}
	r.ring[r.count%recentBatches] = b
	r.count++
}

// BatchesSince lists the remembered batches without the stage's first ones; false if the
// ring is gone. It is called away from the loop.
func (s *Stage) BatchesSince(since uint64) (out stats.Batches, ok bool) {
	var records []batchRecord
	var now, wall int64 // the same moment on both clocks
	if !s.ring.Do(func() {
		r := &s.recent
		now, wall = s.loop.clock(), time.Now().UnixMicro()
		first := max(min(since, r.count), r.count-min(r.count, recentBatches))
		for i := first; i < r.count; i++ {
			records = append(records, r.ring[i%recentBatches])
		}
		out.Count = r.count
	}) {
		return out, false
	}
	at := func(t int64) int64 { return wall - (now-t)/1000 }
	out.NowUS, out.Batches = wall, make([]stats.Batch, len(records))
	for i, r := range records {
		out.Batches[i] = stats.Batch{
			Worker: int(r.worker), Rows: int(r.rows), Requests: int(r.requests),
			PostedUS: at(r.posted), StartedUS: at(r.started), FinishedUS: at(r.finished),
		}
	}
	return out, true
}
