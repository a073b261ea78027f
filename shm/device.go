// SPDX-License-Identifier: Apache-2.0

package shm

// Device is the memory of a GPU that peers share by descriptors. Packages that are built
// with CUDA implement it.
type Device interface {
	// Allocate allocates memory on the GPU of that number and exports it. The caller
	// closes the descriptor, which keeps the memory.
	Allocate(bytes int64, number int) (fd int, gpu string, err error)
	// Import maps exported memory on the GPU with that UUID into this process. The
	// caller closes the descriptor.
	Import(fd int, bytes int64, gpu string) error
	// Synchronize waits until the GPU has finished all work of this process.
	Synchronize()
	// Close unmaps the memory.
	Close()
}
