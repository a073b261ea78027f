// SPDX-License-Identifier: Apache-2.0

// Package gateway is the HTTP and gRPC gateway of a broker: the Open Inference
// Protocol with the extensions that Triton's tools need.
//
//	New, Serve   open the doors, serve until the context ends, and drain
//	core/        calls, models, callers and their limits, for both doors
//	httpapi/     the HTTP door, on net/http
//	grpcapi/     the gRPC door, on grpc-go
//	oip/         the protocol's messages and wire code, shared with package relay
//	console/     metrics for Prometheus, and the page
//	interop/     tests with NVIDIA's clients
//
// A gateway is an ordinary client of the ring. The libraries, an account per caller
// (core/shares.go) and a listener that counts connections (core/connections.go)
// bound its callers. docs/gateway.md is the manual.
package gateway
