// SPDX-License-Identifier: Apache-2.0

package auto

import "math/bits"

// Batch sizes fall into classes: up to exactSizes each size has its own class,
// beyond that eight classes lie between two powers of two.
const (
	exactSizes  = 32
	sizeClasses = exactSizes + 8*16
)

func classOf(rows int) int {
	if rows <= exactSizes {
		return max(rows, 1) - 1
	}
	octave := bits.Len(uint(rows-1)) - 6 // 33..64: 0
	return min(exactSizes+8*octave+(rows-1-32<<octave)>>(octave+2), sizeClasses-1)
}

// sizeOf is the middle of a class.
func sizeOf(class int) int {
	if class < exactSizes {
		return class + 1
	}
	octave, eighth := (class-exactSizes)/8, (class-exactSizes)%8
	return 32<<octave + (eighth<<(octave+2) + 2<<octave)
}

// grown returns s long enough to index i; new entries are zero.
func grown[T any](s []T, i int) []T {
	if i < len(s) {
		return s
	}
	bigger := make([]T, max(2*len(s), i+1, 16))
	copy(bigger, s)
	return bigger
}
