// SPDX-License-Identifier: Apache-2.0

// Package mlp is a float32 multi-layer perceptron on which batching pays: its
// weights are far larger than a core's caches, so one row costs a whole pass
// over memory, and thirty-two rows cost little more.
//
//	cfg := mlp.Default()            // 1024 → 4096 → 4096 → 1024, 96 MiB of weights
//	m, err := mlp.New(cfg)          // deterministic from cfg.Seed
//	m, err := mlp.Load("w.safetensors") // or from torch-style nn.Linear tensors
//	m.Forward(dst, src, 32)         // contiguous rows
//	m.ForwardRows(dstRows, srcRows) // rows anywhere, e.g. slots of a ring
//
// Every hidden layer is followed by ReLU, the last one by nothing.
//
// # Ownership
//
// An MLP has scratch memory and serves one goroutine at a time. After the first
// call with the largest row count, a call allocates nothing. The inputs are copied
// out before anything is written, so dst may be the same memory as src.
//
// # How it computes
//
// Weights are packed once into panels (see layout.go), in the order in which
// they are read; micro-kernels in assembly (AVX-512, AVX2+FMA) or plain Go then
// walk them, each weight fetched from memory once per batch.
//
// # Same bits
//
// Each output is one chain over k = 0, 1, 2 …: bias, then one fused multiply-add
// per input. Neither the row count nor the row's place in the batch changes that
// chain, nor do AVX-512 and AVX2: the bits are the same.
// The portable kernel rounds after the multiplication where the compiler has no
// fused instruction, and so agrees within the tolerance only.
//
// # Tolerance
//
// Against float64, each output of one layer is off by at most
// (k+2)·2⁻²³·(|bias| + Σ|x·w|), k the layer's inputs; typically by far less.
package mlp
