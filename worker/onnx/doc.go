// SPDX-License-Identifier: Apache-2.0

// Package onnx serves an ONNX file with ONNX Runtime from Go, without Python. ONNX Runtime
// reads and writes contiguous rows in the ring; other rows are gathered in a buffer.
//
//	err := onnx.Serve(ctx, onnx.Config{File: "resnet50.onnx", Worker: worker.Config{Model: "resnet50"}})
//
// It is a separate module, since it needs cgo and the library libonnxruntime. For graphs
// whose rows differ in size (masks, buckets) use `ringbatch onnx` of the Python package.
package onnx
