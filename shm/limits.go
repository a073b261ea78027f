// SPDX-License-Identifier: Apache-2.0

package shm

import "time"

// Specification: part of the protocol, the same for every peer in every language. A
// change that makes old programs wrong needs a new LayoutVersion.
const (
	LayoutVersion = 1

	reasonBytes  = 1024 // room for the text of a failure, per slot
	MaxSlots     = 1 << 20
	MaxBatchRows = 1 << 14
	MaxMailDepth = 256 // batches one worker may hold

	pageSize      = 4096
	cacheLine     = 64
	segmentHeader = pageSize // every segment starts with one page of header and words
	deviceGrain   = 2 << 20  // device memory is a multiple of this
)

// Implementation: free to change.
const (
	// Futex waits are cut into slices: a wake-up that a broken peer steals delays the
	// waiter by at most this time.
	waitSlice = 500 * time.Millisecond
)
