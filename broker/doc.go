// Package broker is the only one who decides. It owns the segments, leases
// windows of slots to clients, takes their commits, forms batches with
// package batcher, posts them to workers, and cleans up after whoever dies.
//
//	b, err := broker.New(broker.Config{})
//	err = b.Serve(ctx) // until ctx ends; then it drains
//
// How a request passes through, stage by stage, each in the file named:
//
//  1. loop.go      one goroutine owns all state and sleeps in epoll
//  2. clients.go   a client's doorbell rings: its commits are read, checked
//     against the private books (slots.go), and given to the batcher
//  3. dispatch.go  the batcher decides; batches are posted to workers
//  4. workers.go   a worker's "done" frees slots and makes room for the next
//  5. reaper.go    death, hanging and leaving, of clients and workers
//
// The control plane (listen.go, conn.go) runs in goroutines of its own and
// reaches the state only by functions posted to the loop.
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
