// SPDX-License-Identifier: Apache-2.0

// Package relay is a worker whose model runs on other hosts: it takes batches
// from this host's broker and sends each as one gRPC call of the Open Inference
// Protocol, to a ringbatch gateway or to any other server of that protocol.
//
// A batch goes through these steps:
//
//  1. serve.go takes it from the ring, as often as the far side has room
//  2. choose.go finds a host for it
//  3. message.go encodes it: names and shapes in memory of its own, the tensors
//     where they lie, in the slots
//  4. batch.go sends it, looks at what came back, and decides for each of its
//     requests: answered, failed, or to be sent again
//  5. answer.go writes the answer's tensors into the slots
//
// hosts.go knows the hosts of the target and what each has told; balancer.go is
// how gRPC is told which of them to call; check.go asks each whether it is well.
package relay
