// SPDX-License-Identifier: Apache-2.0

// Package client sends requests to models that a ringbatch broker serves.
//
// The simple case copies in and out:
//
//	c, err := client.Dial(ctx, "affine")
//	outs, err := c.Infer(ctx, []float32{1, 2, 3, 4})
//	y, err := tensor.As[float32](outs[0])
//
// Without copies, write into the slot and read from it:
//
//	r, err := c.Claim(ctx, 1)        // slots of the client's window
//	defer r.Release()                // gives them back
//	x, err := r.Input("x")           // a view into shared memory
//	…write…
//	err = r.Commit(ctx)              // the worker owns the slots from here on
//	err = r.Wait(ctx)                // nil, or a named error
//	y, err := r.Output("y")          // a view again, valid until Release
//
// A client may have as many rows in flight as its window has slots (WithWindow), from
// one goroutine or from many. When the window is full, Claim waits and TryClaim returns
// ErrFull. However many goroutines wait, they occupy one OS thread.
//
// When the broker is restarted, requests in flight end with ErrBrokerGone. The client
// attaches again by itself, and Claim waits for that.
//
// Every error that a caller may act on matches one of the named errors of package
// status: compare with errors.Is. ErrExpired also matches context.DeadlineExceeded,
// ErrCanceled also context.Canceled. status.Retryable reports whether the same request
// may succeed if it is sent again.
//
// Package admin lists the models and the statistics of a broker.
package client
