// SPDX-License-Identifier: Apache-2.0

package mlp

import "golang.org/x/sys/unix"

// adviseHugePages asks for 2 MiB pages before the weights are first touched:
// a stream over 96 MiB crosses 48 pages instead of 24,576, and loading faults
// as much less often. It is a hint: without it everything works, a bit slower.
func adviseHugePages(s []float32) {
	const page, worthIt = 4096, 4 << 20
	b := floatBytes(s)
	if len(b) < worthIt {
		return
	}
	// Whole pages inside s only: its neighbours on the heap are not ours to advise.
	b = b[pageOffset(b, page):]
	b = b[:len(b)/page*page]
	_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
}
