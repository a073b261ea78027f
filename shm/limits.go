package shm

import "time"

// Specification: part of the protocol, the same for every peer in every
// language. Changing one of these means a new LayoutVersion.
const (
	LayoutVersion = 1

	MaxVariableDims = 8    // variable dimensions of all inputs together, and of all outputs together
	MaxRank         = 8    // dimensions of one tensor's row
	MaxTensors      = 64   // inputs plus outputs of one model
	MaxNameBytes    = 128  // of a model or tensor name
	ReasonBytes     = 1024 // room for the text of a failure, per slot
	MaxSlots        = 1 << 20
	MaxBatchRows    = 1 << 14
	MaxMailDepth    = 64 // batches one worker may hold

	pageSize      = 4096
	cacheLine     = 64
	segmentHeader = pageSize // every segment starts with one page of header and words
)

// Implementation: free to change.
const (
	// Futex waits are cut into slices so that a wake-up stolen by a damaged
	// peer costs at most this long.
	waitSlice = 500 * time.Millisecond
)
