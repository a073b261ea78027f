// SPDX-License-Identifier: Apache-2.0

// Package shm is the memory protocol between broker, clients and workers: sealed
// segments, their layout, the board of ended requests, the rings and mailboxes of a
// session, and the bells that wake waiting peers.
//
// Programs that use ringbatch do not need it: they import client or worker, and tensor.
// docs/protocol.md describes the protocol in words.
package shm
