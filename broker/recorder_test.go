// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/status"
)

// What the flight recorder costs the loop for each request, on and off, as CPU
// time: that others use the machine does not matter.
func BenchmarkRecorder(b *testing.B) {
	for name, recorder := range map[string]*recorder{"on": newRecorder(), "off": nil} {
		b.Run(name, func(b *testing.B) {
			info := &slotInfo{client: &clientSession{}, worker: &workerSession{}}
			s := &stage{recorder: recorder}
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			before := threadTime(b)
			for range b.N {
				if s.recorder != nil {
					s.recorder.add(info, status.OK, 1, 2)
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
