package main

// #include "internal.h"
import "C"

import (
	"context"
	"errors"
	"unsafe"

	"github.com/ringbatch/ringbatch/shm"
)

// result leaves an error's text in the caller's buffer and gives its number.
func result(err error, msg *C.char) C.int {
	if err == nil {
		return C.RB_OK
	}
	buf := unsafe.Slice((*byte)(unsafe.Pointer(msg)), C.RBGO_MESSAGE_BYTES)
	buf[copy(buf[:len(buf)-1], err.Error())] = 0
	return C.int(statusOf(err))
}

func statusOf(err error) shm.Status {
	var s shm.Status
	switch {
	case errors.As(err, &s):
		return s
	case errors.Is(err, context.DeadlineExceeded):
		return shm.ErrTimeout
	case errors.Is(err, context.Canceled):
		return shm.ErrCanceled
	}
	return shm.ErrInvalid
}
