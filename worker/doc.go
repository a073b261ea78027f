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
// The rows of a batch are views into shared memory: inputs are read in place,
// outputs are written in place. A batch whose rows happen to be neighbours is
// one contiguous tensor (Column.Contiguous); otherwise it is a few runs
// (Batch.Runs, Column.Run) or, always, rows (Row).
//
// A worker must not write into inputs: a batch that outlives its worker is
// run again from the same bytes.
//
// Errors of Serve and Attach are named ones of package shm; compare with
// errors.Is: ErrNoBroker, ErrForbidden (this uid may not connect), ErrVersion
// and ErrLayout (other layout version or geometry), ErrSignatureMismatch (the
// model exists with other tensors), ErrInvalid (of the configuration),
// ErrNoMemory, ErrDraining and ErrBrokerGone.
package worker
