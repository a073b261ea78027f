// SPDX-License-Identifier: Apache-2.0

// Package onnx serves an ONNX file with ONNX Runtime from Go: no Python in the
// process. Rows that lie one after the other in the ring are read and written
// there; others are gathered into a buffer that is used again.
//
//	err := onnx.Serve(ctx, onnx.Config{File: "resnet50.onnx", Worker: worker.Config{Model: "resnet50"}})
//
// It is a module of its own, since it needs cgo and the library libonnxruntime.
// Graphs whose rows differ in size (masks, buckets) are for the Python package's
// `ringbatch onnx`.
package onnx
