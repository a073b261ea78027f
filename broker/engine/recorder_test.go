// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// What the flight recorder costs the loop for each request, on and off, as CPU
// time: that others use the machine does not matter.
func BenchmarkRecorder(b *testing.B) {
	seg, err := shm.Memfd{}.Create("session", shm.ClientSegmentSize(8, true))
	if err != nil {
		b.Fatal(err)
	}
	for name, recorder := range map[string]*recorder{"on": newRecorder(), "off": nil} {
		b.Run(name, func(b *testing.B) {
			l := &Loop{}
			r := &Ring{loop: l, books: [][]slotInfo{make([]slotInfo, chunkSlots)}}
			s := &Stage{loop: l, ring: r, recorder: recorder}
			c := &ClientSession{ring: r, window: 8, times: shm.NewClientTimes(seg, 8)}
			w := &WorkerSession{}
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			before := threadTime(b)
			for i := range b.N {
				e := shm.Commit{Slot: uint32(i) % 8, Gen: uint32(i/8) + 1}
				info := r.slot(e.Slot)
				if s.recorder != nil {
					s.recorder.readBefore(c, &e)
				}
				info.gen, info.head, info.client, info.worker = e.Gen, e.Slot, c, w
				if s.recorder.takesMore() {
					s.recordRequest(info, status.OK, 1, 2)
					if len(s.recorder.requests) == maxTraceRequests {
						s.recorder.requests = s.recorder.requests[:0]
					}
				}
			}
			b.ReportMetric(float64(threadTime(b)-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

func threadTime(b *testing.B) int64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_THREAD, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}
