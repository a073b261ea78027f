// SPDX-License-Identifier: Apache-2.0

package main

import (
	"runtime"
	"testing"
)

func TestOnlyAProcessWithSmallBatchesHasFewerPs(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, c := range []struct {
		all, want  int
		batchBytes int64
	}{{2, 2, 0}, {16, 4, 0}, {64, 16, largeBatch - 1}, {64, 64, largeBatch}} {
		runtime.GOMAXPROCS(c.all)
		if limitProcs(c.batchBytes); runtime.GOMAXPROCS(0) != c.want {
			t.Errorf("%d of %d Ps with batches of %d bytes, want %d", runtime.GOMAXPROCS(0), c.all, c.batchBytes, c.want)
		}
	}
}
