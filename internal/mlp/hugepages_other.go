// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package mlp

func adviseHugePages([]float32) {}
