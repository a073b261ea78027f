// SPDX-License-Identifier: Apache-2.0

// Package core runs inference calls for the gateway's doors.
//
// A door identifies the caller (identity.go), reads a request into a Call
// (call.go), runs it (run.go; relayed.go for a relay's batch), and sends its
// outputs from the slots. Models and aliases follow the broker (models.go,
// alias.go). connections.go and shares.go bound each caller; limits.go has all
// numbers.
package core
