package main

// #include "internal.h"
import "C"

import (
	"context"
	"errors"
	"strings"
	"unicode/utf8"
	"unsafe"

	"github.com/ringbatch/ringbatch/status"
)

// result leaves an error's text in the caller's buffer and gives its number.
func result(err error, msg *C.char) C.int {
	if err == nil {
		return C.RB_OK
	}
	// Names and reasons come from elsewhere, perhaps cut; strings are UTF-8 all the same.
	text := strings.ToValidUTF8(err.Error(), "\uFFFD")
	buf := unsafe.Slice((*byte)(unsafe.Pointer(msg)), C.RBGO_MESSAGE_BYTES)
	n := min(len(text), len(buf)-1)
	for n < len(text) && !utf8.RuneStart(text[n]) {
		n--
	}
	buf[copy(buf, text[:n])] = 0
	return C.int(statusOf(err))
}

func statusOf(err error) status.Code {
	var s status.Code
	switch {
	case errors.As(err, &s):
		return s
	case errors.Is(err, context.DeadlineExceeded):
		return status.ErrTimeout
	case errors.Is(err, context.Canceled):
		return status.ErrCanceled
	}
	return status.ErrInvalid
}
