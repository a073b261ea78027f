// SPDX-License-Identifier: Apache-2.0

// Package cuda is the GPU worker: models whose kernels run on an NVIDIA GPU
// straight from and into the ring.
//
//	m, err := cuda.New("mlp", cuda.Options{})
//	err = cuda.Serve(ctx, worker.Config{Model: "mlp", Signature: m.Signature}, m)
//
// It needs the build tag cuda (make cuda-build). Without it, and on a machine
// without a GPU, New and Serve return an error that matches status.ErrNoGPU.
//
// # How a batch passes
//
//  1. The ring was registered with the driver once, at attach: the GPU reads
//     and writes it in place. Tensors in device memory (x:f32[4]@device:0) stay
//     where their producers wrote them; the first worker allocates that memory.
//  2. A batch that is one run of neighbouring slots comes in by one copy; any
//     other by a kernel that gathers rows by slot number (kernels/move.cu).
//  3. The model's kernels run on contiguous device memory.
//  4. A kernel scatters the outputs into their slots.
//
// All of it is queued on the stream of a lane, with the lane's buffers.
// There are as many lanes as the broker hands over batches at once
// (worker.Config.Depth), so the transfer of the next batch overlaps the
// computation of the current one.
//
// # Errors
//
// Every return code is checked. A call that fails ends the batch with its
// name, such as CUDA_ERROR_OUT_OF_MEMORY. An error after which the driver
// refuses all further work (an illegal address in a kernel, a device that fell
// off the bus) ends Serve with ErrLost: the process must be started again,
// which the broker's supervisor does. Its batches are not answered: the broker
// has them run elsewhere.
package cuda
