// SPDX-License-Identifier: Apache-2.0

// Package gateway is the network door of a broker: the Open Inference Protocol
// over HTTP and gRPC, with the extensions that Triton's tools need.
//
//	New, Serve   open the doors, serve until the context ends, and drain
//	core/        what the doors share: calls, models, callers and their limits
//	httpapi/     the HTTP door, on net/http
//	grpcapi/     the gRPC door, on grpc-go
//	oip/         the protocol's messages and wire code, shared with package relay
//	console/     metrics for Prometheus, and the page
//	interop/     tests with NVIDIA's clients
//
// A gateway is an ordinary client of the ring. Its limits are those of the
// libraries, one account per caller (core/shares.go), and a listener that counts
// connections (core/connections.go). docs/gateway.md is the manual.
package gateway
