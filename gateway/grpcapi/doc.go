// SPDX-License-Identifier: Apache-2.0

// Package grpcapi is the gateway's gRPC door: calls, streams and health. Tensors are
// copied once into slots, and sent from slots.
package grpcapi
