// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker/auto"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// snapshot is the ring's line of the statistics.
func (s *world) snapshot() stats.Model {
	v := &view{stats: stageStats{sizes: make([]uint64, s.r.layout.MaxBatch+1)}}
	s.st.lookAtStage(v)
	return v.model()
}

func TestASnapshotChangesNothing(t *testing.T) {
	ahead := 0
	changeNothing(t, 2000, unlessShort(12, 4), func(s *world) {
		m := s.snapshot()
		var ended uint64
		for _, n := range m.Ended {
			ended += n
		}
		if before := s.st.stats.allEnded(); ended > before {
			ahead++
		} else if ended < before {
			t.Fatalf("%d ends, the books have %d", ended, before)
		}
		if ok, timed := m.Ended[status.OK.Name()], m.Histograms.Total.Count; ok > timed {
			t.Fatalf("%d requests were answered, the time of %d is known", ok, timed)
		}
		if ended > m.Requests || m.SlotsRunning < 0 || m.SlotsHeld < 0 || m.SlotsQueued != m.QueueRows {
			t.Fatalf("%d of %d requests ended, %d slots run, %d are held, %d wait (%d rows)",
				ended, m.Requests, m.SlotsRunning, m.SlotsHeld, m.SlotsQueued, m.QueueRows)
		}
	})
	if ahead < 5 {
		t.Errorf("only %d snapshots were ahead of the books: the test does not test", ahead)
	}
}

func TestAWindowIsTheLastWholeSeconds(t *testing.T) {
	s := newModel(t, quietModel)
	s.attachWorker()
	s.attachClient()
	begin := s.now // a whole hour
	at := func(after time.Duration) { s.now = begin + int64(after); s.l.now = s.now }
	for second, n := range []int{5, 7, 11} {
		at(time.Duration(second) * time.Second)
		s.serve(t, n)
	}
	for _, c := range []struct {
		after             time.Duration
		one, ten, sixty   float64
		measured, measure int
	}{
		{2900 * time.Millisecond, 7, 6, 6, 1, 2},
		{3 * time.Second, 11, 23. / 3, 23. / 3, 1, 3},
		{4 * time.Second, 0, 23. / 4, 23. / 4, 1, 4},
		{11 * time.Second, 0, 1.8, 23. / 11, 1, 10},
		{13 * time.Second, 0, 0, 23. / 13, 1, 10},
		{61 * time.Second, 0, 0, 18. / 60, 1, 10},
		{70 * time.Second, 0, 0, 0, 1, 10},
	} {
		at(c.after)
		m := s.snapshot()
		near := func(x, y float64) bool { return x > y-1e-9 && x < y+1e-9 }
		w := m.Windows
		if !near(w[0].RequestsPerS, c.one) || !near(w[1].RequestsPerS, c.ten) || !near(w[2].RequestsPerS, c.sixty) ||
			w[0].MeasuredS != c.measured || w[1].MeasuredS != c.measure {
			t.Errorf("after %v: %+v, want %v", c.after, w, c)
		}
		if m.Ended[status.OK.Name()] != 23 || m.Histograms.Total.Count != 23 {
			t.Errorf("after %v: %v ended, %d latencies", c.after, m.Ended, m.Histograms.Total.Count)
		}
	}
}

func TestABatchOfSeveralSecondsKeepsItsWorkerBusyInEachOfThem(t *testing.T) {
	var s stageStats
	s.rollSecond(int64(100*time.Second), 1)
	s.rollSecond(int64(105*time.Second), 1)
	s.seconds.spreadComputed(int64(102500*time.Millisecond), int64(104250*time.Millisecond))
	for second, want := range map[int64]float64{102: 0, 103: 0.5, 104: 1, 105: 0.25} {
		if w := s.seconds.lastSeconds(second*int64(time.Second), 1); w[0].Busy != want {
			t.Errorf("in the second before %d it was busy for %v, want %v", second, w[0].Busy, want)
		}
	}
}

func TestLearnedCostsOfAModelWithAMaximumCostAreNotCalledRows(t *testing.T) {
	v := view{settings: policy.Settings{MaxBatchSize: 64, MaxBatchCost: 8192}}
	v.takeLearned(auto.Learned{Costs: []auto.LearnedCost{{Rows: 34, Batches: 1}}}) // 34/64 of the maximum
	if c := v.out.Learned.Costs[0]; c.Rows != 0 || c.Cost != 4352 || c.Size() != "cost 4352" {
		t.Errorf("%+v", c)
	}
}
