// SPDX-License-Identifier: Apache-2.0

// Package engine batches requests between clients and workers in shared memory:
// event loops with their rings, slots, stages and sessions. It knows no socket
// and no configuration: package broker accepts peers and makes models.
//
// A model is a ring with a stage. The ring is memory and the books about it: it
// knows to whom a slot belongs, and which commits are legal. The stage is a
// batcher with its workers: it decides when and where a request runs. A pipeline
// is a ring with several stages. Each ring belongs to one loop. Loops share
// nothing.
//
// The path of a request, step by step, each in the file named:
//
//  1. loop.go      the loop is woken (poller.go) and runs a round
//  2. commits.go   the client that rang has its turn: the loop reads its commits
//  3. catchup.go   the books catch up with the answers that workers gave meanwhile
//  4. slots.go     the commit is checked against the books
//  5. stage.go     the batcher gets the request
//  6. dispatch.go  the batcher decides; the loop posts batches to workers
//  7. catchup.go   a worker's "done" frees slots and makes room for the next batch;
//     settle.go    ends the request, here and wherever else a request ends
//
// Consequences for peers that broke a rule, or came back, wait until everything is
// read: outcomes.go.
//
// Beside the path: attach.go begins sessions, clients.go and workers.go keep them,
// states.go has their states, reaper.go ends workers that die, hang or leave,
// suspend.go judges workers that fail, retries.go runs requests again, windows.go
// leases slots.
//
// Only a loop's goroutine touches the state of its rings. Exported methods say
// whether they are called on the loop (Loop.Do, Loop.Post) or away from it.
package engine
