// SPDX-License-Identifier: Apache-2.0

// Package worker serves a model: the broker hands whole batches to a function.
//
//	sig := tensor.Signature{Inputs: …, Outputs: …}
//	err := worker.Serve(ctx, worker.Config{Model: "double", Signature: sig, Policy: policy.New(policy.MaxBatchSize(32))},
//		func(ctx context.Context, b *worker.Batch) error {
//			for i := range b.Rows() {
//				x, y := worker.Row[float32](b.Input(0), i), worker.Row[float32](b.Output(0), i)
//				for j := range x {
//					y[j] = 2 * x[j]
//				}
//			}
//			return nil
//		})
//
// # Requests and rows
//
// A client sends a request with one call, and a request is answered or fails as a
// whole. It has one row or more: a client may send three images at once. A row is one
// item of every tensor, without the batch dimension.
//
//	requests   0           1     2           b.Len() = 3     Request(i), Fail(i), SetOutputDims(i), Waiting(i)
//	rows       0  1  2     3     4  5        b.Rows() = 6    Input(k), Output(k), Row(column, i), Slots()[i], SetRowDims(i)
//
// Models compute on rows and rarely look at requests. Request(i).Row and .Rows are the
// rows of request i. MaxBatchSize counts rows.
//
// The rows of a batch are views into shared memory: the worker reads inputs and writes
// outputs in place. If all rows are neighbours, the batch is one contiguous tensor
// (Column.Contiguous). Otherwise it is a few runs (Batch.Runs, Column.Run). Row works
// always. A worker must not write into inputs: if it dies, another worker runs the
// batch again from the same bytes.
//
// # Several batches at once
//
// The broker hands over Config.Depth batches, so that the next batch is there when one
// is done. Serve runs one batch at a time. With Config.Concurrency it runs several, for
// functions that wait, for example for another host, rather than compute. Any goroutine
// may complete a batch, in any order. Batch.Context ends when no client waits for the
// batch any more.
//
// A worker with a different loop, for example to poll GPU streams, takes batches from a
// Worker inside KeepAttached.
//
// # Errors
//
// Errors match the named errors of package status; compare with errors.Is. A restart of
// the broker is no error: Serve and KeepAttached attach again. They end with an error
// that another attempt cannot remove: ErrVersion and ErrLayout (the broker is another
// release), ErrSignatureMismatch (the model has other tensors), ErrForbidden (this user
// may not connect), ErrInvalid (a bad Config). See status.RetryAttach.
package worker
