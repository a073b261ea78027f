// SPDX-License-Identifier: Apache-2.0

// Package tensor has the tensors that clients and workers exchange: element types, views
// of memory, and the signature of a model.
//
//	sig, err := tensor.ParseSignature([]string{"x:f32[3,224,224]"}, []string{"y:f32[1000]"})
//	x := tensor.Of("x", pixels, 1, 3, 224, 224) // a slice as a tensor of one row
//	y, err := tensor.As[float32](outs[0])       // a tensor's elements, without a copy
//
// Its errors match the named errors of package status.
package tensor
