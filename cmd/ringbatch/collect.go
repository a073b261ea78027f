// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime/debug"
)

// collectSeldom makes the garbage collector run less often while the heap is
// small, as it mostly is; with so many bytes in buffers it takes no more than it
// would by itself.
func collectSeldom(buffers int64) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(128<<20 + 2*buffers)
	}
}
