// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime"
	"runtime/debug"
)

const (
	leastProcs = 4
	largeBatch = 256 << 10 // bytes
)

// limitProcs leaves a process with small batches a quarter of the Ps. When a goroutine
// becomes ready while a P is idle, the scheduler wakes a thread for it. The goroutines of
// one call run one after the other, so that thread finds nothing to do: with many idle Ps
// this is half the cost of a small call. Large batches, whose long system calls occupy
// Ps, keep all Ps.
func limitProcs(batchBytes int64) {
	if all := runtime.GOMAXPROCS(0); os.Getenv("GOMAXPROCS") == "" && batchBytes < largeBatch {
		runtime.GOMAXPROCS(min(all, max(leastProcs, all/4)))
	}
}

// collectSeldom makes the garbage collector run less often while the heap is small. With
// all buffers in use it limits the heap to about its usual size: the process takes up to
// 128 MiB and twice the buffers, the program's own pages included.
func collectSeldom(buffers int64) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(96<<20 + 2*buffers)
	}
}
