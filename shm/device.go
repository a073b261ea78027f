// SPDX-License-Identifier: Apache-2.0

package shm

// Device is the memory of a GPU that peers share by descriptors. Go itself has
// none: a package that is built with CUDA brings it.
type Device interface {
	// Allocate makes memory on the GPU of that number and exports it. The
	// descriptor, which keeps it, is the caller's.
	Allocate(bytes int64, number int) (fd int, gpu string, err error)
	// Import maps such memory, which is on the GPU with that UUID, into this process.
	// The descriptor stays the caller's.
	Import(fd int, bytes int64, gpu string) error
	// Synchronize waits until the GPU has done all work of this process.
	Synchronize()
	// Close unmaps it.
	Close()
}
