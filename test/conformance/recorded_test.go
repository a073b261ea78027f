// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"math"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/internal/control"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/shm"
)

// recorded repeats a request and returns a recording of the model m meanwhile.
func recorded(t *testing.T, socket string, request func()) *stats.Trace {
	t.Helper()
	for {
		done := make(chan *stats.Trace)
		go func() {
			defer close(done)
			trace, err := admin.New(socket).Trace(t.Context(), "m", 100*time.Millisecond)
			if err != nil {
				t.Errorf("trace: %v", err)
			}
			done <- trace
		}()
		for {
			request()
			select {
			case trace := <-done:
				if t.Failed() {
					t.FailNow()
				}
				if len(trace.Requests) >= 3 {
					return trace
				}
			default:
				continue
			}
			break // too few requests: once more
		}
	}
}

// startWorker starts a broker and a worker of the model m.
func startWorker(t *testing.T) (*ringbatchtest.Broker, *peer) {
	t.Helper()
	b := ringbatchtest.Start(t, broker.Config{OpenFolder: true, DrainTime: 100 * time.Millisecond})
	worker := start(t, "Go", b.Socket())
	worker.do(t, "attach m|x:f32[4] -> y:f32[4]|wait_time=0 slots=64", "OK")
	return b, worker
}

// slack, in microseconds, allows for a machine that stands still when a recording
// begins or ends.
const slack = 60e6

// inOrder checks the order of a request's times.
func inOrder(t *testing.T, trace *stats.Trace, r *stats.TracedRequest) {
	t.Helper()
	times := []float64{r.CommittedUS, r.DispatchedUS, r.StartedUS, r.FinishedUS}
	if r.ClaimedUS != 0 {
		times = append([]float64{trace.FromUS - slack, r.AskedUS, r.ClaimedUS}, times...)
	}
	if r.WokenUS != 0 {
		times = append(times, r.WokenUS)
	}
	times = append(times, trace.ToUS+slack)
	for i := range len(times) - 1 {
		if times[i] > times[i+1]+1 { // a float64 of microseconds since 1970 is exact to 0.25
			t.Errorf("%.1f is after %.1f in %+v", times[i], times[i+1], r)
		}
	}
}

// The first request may have been claimed before the recording began, and the last may
// not have been read when it ends. All others have every time.
func TestBothClientsTellARecordingWhenTheyClaimedAndWoke(t *testing.T) {
	b, worker := startWorker(t)
	for _, language := range []string{"Go", "C"} {
		client := start(t, language, b.Socket())
		client.do(t, "connect m 4", "OK")
		trace := recorded(t, b.Socket(), func() {
			for _, command := range []string{"claim r0 1 0", "fill r0 5", "commit r0 0"} {
				client.do(t, command, "OK")
			}
			worker.do(t, "next 20000", "OK…")
			worker.do(t, "answer", "OK")
			client.do(t, "wait r0 20000", "OK")
			client.do(t, "release r0", "OK")
		})
		claimed, woken := 0, 0
		for i := range trace.Requests {
			r := &trace.Requests[i]
			inOrder(t, trace, r)
			if r.ClaimedUS != 0 {
				claimed++
			}
			if r.WokenUS != 0 {
				woken++
			}
		}
		if n := len(trace.Requests); claimed < n-1 || woken < claimed-1 {
			t.Errorf("%s: of %d requests %d were claimed and %d woken", language, n, claimed, woken)
		}
		client.do(t, "close", "OK")
	}
}

// The broker leaves impossible times of a client out, and keeps the times of a client
// that has left.
func TestTimesThatCannotBeAreLeftOutOfARecording(t *testing.T) {
	b, worker := startWorker(t)
	absurd := []int64{math.MinInt64, -1, 0, 1, 1 << 62, math.MaxInt64}
	for _, tells := range []bool{true, false} { // an older client has no room for times
		n := 0
		trace := recorded(t, b.Socket(), func() {
			s, err := attach.Open(t.Context(), b.Socket(),
				&control.Request{Op: control.OpClient, Model: "m", Window: 1, Times: tells})
			must.Do(t, err)
			defer s.Close()
			commits := shm.Producer[shm.Commit]{Ring: shm.CommitRing(s.Words, 1)}
			for gen := s.Info.FirstGen + 1; gen < s.Info.FirstGen+4; gen++ {
				now := shm.Now()
				if tells {
					times := shm.NewClientTimes(s.Words, 1)
					told := times.Of(0, gen)
					told.Gen = gen
					told.Asked, told.Claimed = absurd[n%len(absurd)], now+absurd[n/len(absurd)%len(absurd)]
					told.Woken.Store(absurd[n/len(absurd)/len(absurd)%len(absurd)])
					n++
				}
				if ring, _ := commits.Push(&shm.Commit{Kind: shm.KindCommit, Level: -1, Rows: 1, Slot: s.Info.FirstSlot, Gen: gen,
					Committed: now}); ring {
					s.Doorbell.Ring()
				}
				worker.do(t, "next 20000", "OK…")
				worker.do(t, "answer", "OK")
			}
		})
		for i := range trace.Requests {
			r := &trace.Requests[i]
			inOrder(t, trace, r)
			if !tells && (r.ClaimedUS != 0 || r.WokenUS != 0) {
				t.Errorf("a client without times has some: %+v", r)
			}
		}
	}
}
