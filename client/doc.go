// SPDX-License-Identifier: Apache-2.0

// Package client is the producer's side of ringbatch.
//
// The simple case copies in and out:
//
//	c, err := client.Dial(ctx, "affine")
//	outs, err := c.Infer(ctx, []float32{1, 2, 3, 4})
//	y, err := tensor.As[float32](outs[0])
//
// Without copies, write into the slot and read from it:
//
//	r, err := c.Claim(ctx, 1)        // slots of our own window
//	defer r.Release()                // gives them back
//	x, err := r.Input("x")           // a view into shared memory
//	…write…
//	err = r.Commit(ctx)              // the worker's from here on
//	err = r.Wait(ctx)                // nil, or the named error it ended with
//	y, err := r.Output("y")          // a view again, ours until Release
//
// Many requests may be in flight at once, from one goroutine or from many,
// as far as the window goes (WithWindow); when it is full, Claim waits and
// TryClaim answers ErrFull. However many goroutines wait, one OS thread does.
//
// When the broker is restarted, requests in flight end with ErrBrokerGone,
// and the client attaches again by itself: Claim waits for it.
//
// Every error that a caller may act on is one of the named errors below, which
// are those of package status; compare with errors.Is. Whether sending the same
// request again may help is one question for all of them:
//
//	var code status.Code
//	if errors.As(err, &code) && code.Retryable() {
//		…
//	}
//
// Package admin lists the models and the statistics of a broker.
package client
