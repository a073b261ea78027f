// SPDX-License-Identifier: Apache-2.0

// Package worker is the model's side of ringbatch: a function that is given
// whole batches.
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
// A request is what one client sent with one call, and what is answered, or
// fails, as a whole. It has one row or more: a client may send three images
// at once. A row is one item of every tensor, without the batch dimension.
//
//	requests   0           1     2           b.Len() = 3     Request(i), Fail(i), SetOutputDims(i), Waiting(i)
//	rows       0  1  2     3     4  5        b.Rows() = 6    Input(k), Output(k), Row(column, i), Slots()[i], SetRowDims(i)
//
// Models compute on rows and mostly need not know about requests. Who fails a
// request knows its rows from Request(i).Row and .Rows. MaxBatchSize counts
// rows.
//
// The rows of a batch are views into shared memory: inputs are read in place,
// outputs are written in place. A batch whose rows happen to be neighbours is
// one contiguous tensor (Column.Contiguous); otherwise it is a few runs
// (Batch.Runs, Column.Run) or, always, rows (Row). A worker must not write
// into inputs: a batch that outlives its worker is run again from the same
// bytes.
//
// # Several batches at once
//
// The broker hands over Config.Depth batches, so that the next one is there
// when one is done. Serve runs one of them at a time, or Config.Concurrency:
// for functions that wait for something else, such as another host, rather
// than compute. Batches are completed in any order, by any goroutine. Work
// that can be given up watches Batch.Context.
//
// A worker with a loop of its own (a GPU's, that polls its streams) takes
// batches from a Worker inside KeepAttached.
//
// # Errors
//
// Errors are named ones of package status; compare with errors.Is. A broker
// that is restarted is no error: Serve and KeepAttached attach again. What
// trying again would not mend ends them, also after a restart: ErrVersion and
// ErrLayout (the broker is another release), ErrSignatureMismatch (the model
// exists with other tensors), ErrForbidden (this user may not connect),
// ErrInvalid (of the configuration). status.Code.RetryAttach has the list.
package worker
