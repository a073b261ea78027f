// SPDX-License-Identifier: Apache-2.0

// Package client sends requests to models that a ringbatch broker serves.
//
//	c, err := client.Dial(ctx, "affine")
//	outs, err := c.Infer(ctx, []float32{1, 2, 3, 4}) // copies in and out
//
// Without copies:
//
//	r, err := c.Claim(ctx, 1) // slots of the client's window
//	defer r.Release()         // gives them back
//	x, err := r.Input("x")    // a view into shared memory
//	…write…
//	err = r.Commit(ctx) // the worker owns the slots from here on
//	err = r.Wait(ctx)
//	y, err := r.Output("y") // a view again, valid until Release
//
// However many goroutines wait, they occupy one OS thread. When the broker is restarted,
// requests in flight end with ErrBrokerGone, and the client attaches again by itself.
//
// Errors match those of package status. ErrExpired also matches
// context.DeadlineExceeded, ErrCanceled also context.Canceled.
package client
