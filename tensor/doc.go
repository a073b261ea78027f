// SPDX-License-Identifier: Apache-2.0

// Package tensor is what every user of ringbatch has in hand: element types,
// tensors as views of memory, and the signature of a model.
//
//	sig, err := tensor.ParseSignature([]string{"x:f32[3,224,224]"}, []string{"y:f32[1000]"})
//	x := tensor.Of("x", pixels, 1, 3, 224, 224) // a slice as a tensor of one row
//	y, err := tensor.As[float32](outs[0])       // a tensor's elements, without a copy
//
// Its errors are those of package status.
package tensor
