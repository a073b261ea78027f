// SPDX-License-Identifier: Apache-2.0

// Package broker serves models to clients and workers of one machine. It owns the
// segments, leases windows of slots to clients, takes their commits, forms batches,
// posts them to workers, and cleans up after peers that die.
//
//	b, err := broker.New(broker.Config{})
//	err = b.Serve(ctx) // until ctx ends; then it drains
//
// Package engine is the core: event loops that serve rings, batch requests and
// clean up after peers that die. It has the path of a request, step by step.
// This package is the process around it:
//
//   - listen.go, conn.go, access.go, users.go, refusals.go: connections, permissions
//     and limits of users and processes
//   - attach.go, pidfd.go: sessions of clients and workers
//   - registry.go, model.go, plan.go, pipeline.go, alias.go: models by name, each
//     on one loop
//   - config.go, reload.go, change.go: the configuration and its changes
//   - outside.go: the broker as its loops see it
//   - stats.go, watch.go: answers about the present state
//   - quiet.go: the log, without endless repetitions
//
// A goroutine serves each connection. It reaches the state of a model only by
// functions posted to the model's loop.
//
// Package supervise runs declared worker processes, package configfile reads the
// configuration file.
//
// Errors of New, Reload and the configuration are those of package status; compare
// with errors.Is: ErrInvalid (of the configuration), ErrBrokerRunning (another program
// serves the socket), ErrForbidden (others could reach its folder), ErrNoMemory (a ring
// does not fit), and of Reload also ErrSignatureMismatch and ErrDraining.
package broker
