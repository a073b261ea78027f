// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package mlp

func bestKernel() *kernel { return portable() }
