// SPDX-License-Identifier: Apache-2.0

// Package worker serves a model: the broker hands whole batches to a function.
//
//	err := worker.Serve(ctx, worker.Config{Model: "double", Signature: sig},
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
// A request has one row or more, is answered or fails as a whole, and a row is one item
// of every tensor:
//
//	requests   0           1     2           b.Len() = 3     Request(i), Fail(i), SetOutputDims(i), Waiting(i)
//	rows       0  1  2     3     4  5        b.Rows() = 6    Input(k), Output(k), Row(column, i), Slots()[i], SetRowDims(i)
//
// Rows are views into shared memory. Neighbours form runs (Batch.Runs), and a batch of
// one run is one tensor (Column.Contiguous). A worker must not write into inputs: a
// retry, or a later stage of a pipeline, reads the same memory.
//
// Errors match those of package status. A restart of the broker is no error: Serve and
// KeepAttached attach again while status.RetryAttach is true.
package worker
