// SPDX-License-Identifier: Apache-2.0

// Package testhooks lets tests of this module choose what no program should.
package testhooks

import (
	"sync"

	"github.com/ringbatch/ringbatch/shm"
)

// Create makes a segment, as shm.Create does.
type Create func(name string, size int64) (*shm.Segment, error)

var segments sync.Map // of Create, by socket

// MakeSegments has the broker of that socket, once it starts, make its segments with
// create.
func MakeSegments(socket string, create Create) { segments.Store(socket, create) }

// SegmentsOf is shm.Create, unless MakeSegments was called for the socket.
func SegmentsOf(socket string) Create {
	if create, ok := segments.Load(socket); ok {
		return create.(Create)
	}
	return shm.Create
}
