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
//   - listen.go, conn.go, access.go, users.go, refusals.go, offenders.go: who may
//     connect, and how much of the broker a user or process may have
//   - attach.go, device.go, pidfd.go: sessions of clients and workers
//   - registry.go, model.go, plan.go, pipeline.go, alias.go: models by name, each
//     on one loop
//   - config.go, reload.go, set.go, change.go: what is declared, and how it changes
//   - outside.go: what loops tell and ask about their peers
//   - stats.go, ready.go, watch.go: answers about the present state
//
// Connections are served by goroutines of their own. They reach the state of a
// model only by functions posted to its loop.
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
