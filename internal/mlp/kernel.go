// SPDX-License-Identifier: Apache-2.0

package mlp

import (
	"fmt"
	"strings"
)

// tile is one call of a micro-kernel: some rows of inputs times one tile of
// weights. The assembly reads it by field name (go_asm.h), in bytes.
//
//	cout[r][off+j] = max(floor, cin[r][off+j] + Σk a[r·lda+k] · b[k·nr+j])
type tile struct {
	a    *float32  // first input of the first row
	lda  uintptr   // bytes from one row to the next
	b    *float32  // the tile of weights
	k    int       // inputs in this block; a multiple of unroll, never 0
	cin  **float32 // per row: where its sums come from (the bias, or the block before)
	cout **float32 // per row: where they go
	off  uintptr   // bytes from those pointers to this panel's columns

	prefetch uintptr // bytes from b to what will be needed soon; may lie past the end
	step     uintptr // bytes to move that on per k
	second   uintptr // bytes from there to a second line, when a step spans two; else 0
	floor    float32 // 0 after the last block of a ReLU layer, otherwise -Inf
}

// kernel is a family of micro-kernels, one per row count.
type kernel struct {
	name string
	nr   int           // columns
	rows []func(*tile) // rows[n] does n rows; rows[0] is nil
}

func (k *kernel) maxRows() int { return len(k.rows) - 1 }

// Kernels names what runs on this CPU, best first.
func Kernels() []string {
	var names []string
	for _, k := range available() {
		names = append(names, k.name)
	}
	return names
}

func pickKernel(name string) (*kernel, error) {
	all := available()
	if name == "" {
		return all[0], nil
	}
	for _, k := range all {
		if k.name == name {
			return k, nil
		}
	}
	return nil, fmt.Errorf("%w: no kernel %q on this CPU, there is %s", ErrConfig, name, strings.Join(Kernels(), ", "))
}
