// SPDX-License-Identifier: Apache-2.0

package tensor

import (
	"fmt"
	"unsafe"

	"github.com/ringbatch/ringbatch/status"
)

// All unsafe code of this package: elements as bytes and back.

func bytesOf[T Element](data []T) []byte {
	if len(data) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&data[0])), len(data)*int(unsafe.Sizeof(data[0])))
}

func sliceOf[T Element](b []byte) ([]T, error) {
	var z T
	size := int(unsafe.Sizeof(z))
	if len(b) == 0 {
		return nil, nil
	}
	p := unsafe.Pointer(&b[0])
	if len(b)%size != 0 || uintptr(p)%unsafe.Alignof(z) != 0 {
		return nil, fmt.Errorf("%w: %d bytes do not hold whole, aligned elements of %d", status.ErrSize, len(b), size)
	}
	return unsafe.Slice((*T)(p), len(b)/size), nil
}
