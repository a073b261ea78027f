// SPDX-License-Identifier: Apache-2.0

// Package client sends requests to models that a ringbatch broker serves.
//
//	c, err := client.Dial(ctx, "affine")
//	outs, err := c.Infer(ctx, []float32{1, 2, 3, 4}) // copies in and out
//
// Client.Claim gives a view into shared memory, to write and read without copies.
//
// However many goroutines wait, they occupy one OS thread. When the broker is restarted,
// requests in flight end with ErrBrokerGone, and the client attaches again by itself.
//
// Errors match those of package status. ErrExpired also matches
// context.DeadlineExceeded, ErrCanceled also context.Canceled.
package client
