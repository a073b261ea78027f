// SPDX-License-Identifier: Apache-2.0

// Package oip has the messages of the Open Inference Protocol, and the wire code
// that gateway and relay share.
//
//	inference.proto  the messages, with Triton's extensions; *.pb.go is generated
//	types.go         names of element types
//	codec.go         gRPC messages whose tensors stay in slots or in the transport's buffers
//	request.go       reads a ModelInferRequest in place
//	fields.go        reads and writes fields and parameters
//	relayed.go       a message whose rows are several requests, and its answer
//	load.go          the load report that comes with an answer
package oip
