// SPDX-License-Identifier: Apache-2.0

// Package relay is a worker whose model runs on other hosts: it takes batches
// from this host's broker and sends each as one gRPC call of the Open Inference
// Protocol, to a ringbatch gateway or to any other server of that protocol.
//
// A batch goes through these steps:
//
//  1. relay.go takes it from the ring, as often as the hosts have room
//  2. choose.go finds a host
//  3. message.go encodes it: names and shapes are copied, tensors stay in the slots
//  4. batch.go and sending.go send it; outcome.go decides for each request:
//     answered, failed, or sent again
//  5. answer.go writes the answer's tensors into the slots
//
// hosts.go keeps the state of each host, balancer.go sends a call to the chosen
// host, check.go checks the hosts.
package relay
