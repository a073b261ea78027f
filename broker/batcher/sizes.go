// SPDX-License-Identifier: Apache-2.0

package batcher

import "math/bits"

// Sizes of batches fall into classes: up to exactSizes each has one of its own,
// larger ones share eight classes between powers of two.
const (
	exactSizes  = 32
	sizeClasses = exactSizes + 8*16
)

func sizeClass(rows int) int {
	if rows <= exactSizes {
		return max(rows, 1) - 1
	}
	octave := bits.Len(uint(rows-1)) - 6 // 33..64: 0
	return min(exactSizes+8*octave+(rows-1-32<<octave)>>(octave+2), sizeClasses-1)
}

// sizeOf is about the size of a class.
func sizeOf(class int) int {
	if class < exactSizes {
		return class + 1
	}
	octave, eighth := (class-exactSizes)/8, (class-exactSizes)%8
	return 32<<octave + (eighth<<(octave+2) + 2<<octave)
}

// sizeSet is a set of size classes.
type sizeSet [(sizeClasses + 63) / 64]uint64

func (s *sizeSet) has(i int) bool { return s[i/64]&(1<<(i%64)) != 0 }
func (s *sizeSet) add(i int)      { s[i/64] |= 1 << (i % 64) }
func (s *sizeSet) remove(i int)   { s[i/64] &^= 1 << (i % 64) }
func (s *sizeSet) empty() bool    { return *s == sizeSet{} }

func (s *sizeSet) join(x *sizeSet) {
	for w := range s {
		s[w] |= x[w]
	}
}

func (s *sizeSet) len() (n int) {
	for _, word := range s {
		n += bits.OnesCount64(word)
	}
	return n
}

// next is the first class from i on, or -1.
func (s *sizeSet) next(i int) int {
	if i >= sizeClasses {
		return -1
	}
	word := s[i/64] >> (i % 64) << (i % 64)
	for w := i / 64; ; {
		if word != 0 {
			return w*64 + bits.TrailingZeros64(word)
		}
		if w++; w == len(s) {
			return -1
		}
		word = s[w]
	}
}

// previous is the last class up to i, or -1.
func (s *sizeSet) previous(i int) int {
	if i < 0 {
		return -1
	}
	word := s[i/64] << (63 - i%64) >> (63 - i%64)
	for w := i / 64; ; {
		if word != 0 {
			return w*64 + 63 - bits.LeadingZeros64(word)
		}
		if w--; w < 0 {
			return -1
		}
		word = s[w]
	}
}
