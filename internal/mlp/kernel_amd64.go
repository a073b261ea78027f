// SPDX-License-Identifier: Apache-2.0

package mlp

import "golang.org/x/sys/cpu"

func bestKernel() *kernel {
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		return &kernel{name: "avx2", nr: 16, rows: []func(*tile){nil, avx2x1, avx2x2, avx2x3, avx2x4, avx2x5, avx2x6}}
	}
	return portable()
}

//go:noescape
func avx2x1(t *tile)

//go:noescape
func avx2x2(t *tile)

//go:noescape
func avx2x3(t *tile)

//go:noescape
func avx2x4(t *tile)

//go:noescape
func avx2x5(t *tile)

//go:noescape
func avx2x6(t *tile)
