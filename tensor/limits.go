// SPDX-License-Identifier: Apache-2.0

package tensor

// Specification: part of the protocol, the same for every peer in every language. A
// change needs a new shm.LayoutVersion.
const (
	MaxVariableDims = 8   // variable dimensions of all inputs together, and of all outputs together
	MaxRank         = 8   // dimensions of one tensor's row
	MaxTensors      = 64  // inputs plus outputs of one model
	MaxNameBytes    = 128 // of a model or tensor name
	MaxDimNameBytes = 31  // of a variable dimension's name
	MaxDevices      = 64  // numbers of GPUs in device:N
)
