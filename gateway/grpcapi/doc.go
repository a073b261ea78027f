// SPDX-License-Identifier: Apache-2.0

// Package grpcapi is the gateway's gRPC door: calls, streams and health, with
// tensors that are copied once, and sent from slots.
package grpcapi
