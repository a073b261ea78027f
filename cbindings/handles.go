package main

import (
	"sync"
	"sync/atomic"
)

// table gives out numbers for Go values. Looking one up takes no lock: the
// list is copied when it changes, which is when something connects or closes.
//
//	63          32 31          0
//	+-------------+-------------+
//	| generation  | index       |   never 0: generations start at 1
//	+-------------+-------------+
type table[T any] struct {
	mu      sync.Mutex
	entries atomic.Pointer[[]entry[T]]
}

type entry[T any] struct {
	gen   uint32
	value *T // nil: free
}

func (t *table[T]) put(v *T) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []entry[T]
	if old := t.entries.Load(); old != nil {
		list = append(list, *old...)
	}
	i := 0
	for i < len(list) && list[i].value != nil {
		i++
	}
	if i == len(list) {
		list = append(list, entry[T]{})
	}
	list[i] = entry[T]{list[i].gen + 1, v}
	t.entries.Store(&list)
	return uint64(list[i].gen)<<32 | uint64(i)
}

func (t *table[T]) get(id uint64) *T {
	list := t.entries.Load()
	if list == nil || id&0xffffffff >= uint64(len(*list)) {
		return nil
	}
	if e := &(*list)[uint32(id)]; e.gen == uint32(id>>32) {
		return e.value
	}
	return nil
}

// remove takes a value out; nil if it is out already.
func (t *table[T]) remove(id uint64) *T {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.get(id)
	if v == nil {
		return nil
	}
	list := append([]entry[T](nil), *t.entries.Load()...)
	list[uint32(id)].value = nil
	t.entries.Store(&list)
	return v
}

// The open handles of the process: a C library has no other place for them.
var (
	clients table[clientHandle]
	workers table[workerHandle]
	maps    table[mapHandle]
)

// mapHandle holds a mapping until it is released.
type mapHandle struct{ release func() }
