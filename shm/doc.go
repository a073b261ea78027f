// SPDX-License-Identifier: Apache-2.0

// Package shm is the memory protocol between broker, clients and workers: sealed
// segments, their layout, the board of ended requests, the rings and mailboxes of a
// session, and the bells that wake waiting peers.
//
// It is the room of the memory protocol, for the other rooms of this module: programs get
// no promise about it. They import client or worker, and tensor. docs/protocol.md
// describes the protocol in words.
package shm
