// SPDX-License-Identifier: Apache-2.0

// Package broker is the only one who decides. It owns the segments, leases
// windows of slots to clients, takes their commits, forms batches with
// package batcher, posts them to workers, and cleans up after those who die.
//
//	b, err := broker.New(broker.Config{})
//	err = b.Serve(ctx) // until ctx ends; then it drains
//
// A model is a ring with a stage. The ring (ring.go, windows.go, slots.go,
// clients.go) is memory and the books about it: it knows whose a slot is and
// what is legal. The stage (stage.go, dispatch.go, workers.go, reaper.go) is a
// batcher with its workers: it decides when and where a request runs. Each
// ring belongs to one of a few loops, which share nothing.
//
// How a request goes, step by step, each in the file named:
//
//  1. loop.go      its ring's loop is woken (poller.go) and runs a round
//  2. clients.go   the client that rang has its turn: its commits are read
//  3. catchup.go   the books follow what workers have done meanwhile
//  4. slots.go     the commit is checked against the books
//  5. stage.go     it is given to the batcher
//  6. dispatch.go  the batcher decides; batches are posted to workers
//  7. catchup.go   a worker's "done" frees slots and makes room for the next
//
// On the side, reaper.go: death, hanging and leaving of workers.
//
// The control plane (listen.go, conn.go) runs in goroutines of its own. It
// finds and makes models in the registry (registry.go), and reaches their
// state only by functions posted to their loop. What costs time that grows with
// a peer's numbers, making a ring or a session, is done before.
//
// Beside it: package supervise runs declared worker processes, package
// configfile reads the configuration file.
//
// Errors of New, Reload and the configuration are named ones of package status;
// compare with errors.Is: ErrInvalid (of the configuration), ErrBrokerRunning
// (somebody serves the socket), ErrForbidden (others could reach its folder),
// ErrNoMemory (a ring does not fit), and of Reload also ErrSignatureMismatch
// and ErrDraining.
package broker
