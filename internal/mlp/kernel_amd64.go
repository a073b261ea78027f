// SPDX-License-Identifier: Apache-2.0

package mlp

import "golang.org/x/sys/cpu"

func available() []*kernel {
	var all []*kernel
	if cpu.X86.HasAVX512F {
		all = append(all, &kernel{name: "avx512", nr: 32, rows: []func(*tile){
			nil, avx512x1, avx512x2, avx512x3, avx512x4, avx512x5, avx512x6, avx512x7,
			avx512x8, avx512x9, avx512x10, avx512x11, avx512x12, avx512x13, avx512x14,
		}})
	}
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		all = append(all, &kernel{name: "avx2", nr: 16, rows: []func(*tile){
			nil, avx2x1, avx2x2, avx2x3, avx2x4, avx2x5, avx2x6,
		}})
	}
	return append(all, portable())
}

//go:noescape
func avx512x1(t *tile)

//go:noescape
func avx512x2(t *tile)

//go:noescape
func avx512x3(t *tile)

//go:noescape
func avx512x4(t *tile)

//go:noescape
func avx512x5(t *tile)

//go:noescape
func avx512x6(t *tile)

//go:noescape
func avx512x7(t *tile)

//go:noescape
func avx512x8(t *tile)

//go:noescape
func avx512x9(t *tile)

//go:noescape
func avx512x10(t *tile)

//go:noescape
func avx512x11(t *tile)

//go:noescape
func avx512x12(t *tile)

//go:noescape
func avx512x13(t *tile)

//go:noescape
func avx512x14(t *tile)

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
