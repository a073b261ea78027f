// SPDX-License-Identifier: Apache-2.0

package batcher

// minHeap is a 4-ary heap over small ids that knows where each id sits, so
// that any entry can be changed or removed. Four children per node make it
// half as deep as a binary heap, and the four share a cache line or two.
//
// Entries are ordered by (key, tie). Nothing is allocated once the arrays
// have reached the largest size and id they ever needed.
type minHeap struct {
	items []heapItem
	pos   []int32 // by id: 1 + its index in items, or 0
}

type heapItem struct {
	key, tie int64
	id       uint32
}

func (a heapItem) less(b heapItem) bool {
	return a.key < b.key || (a.key == b.key && a.tie < b.tie)
}

func (h *minHeap) empty() bool   { return len(h.items) == 0 }
func (h *minHeap) min() heapItem { return h.items[0] }

func (h *minHeap) has(id uint32) bool {
	return int(id) < len(h.pos) && h.pos[id] != 0
}

// set inserts id, or moves it to where its new key belongs.
func (h *minHeap) set(id uint32, key, tie int64) {
	item := heapItem{key, tie, id}
	h.pos = grown(h.pos, int(id))
	i := int(h.pos[id]) - 1
	if i < 0 {
		h.items = append(h.items, item)
		h.up(len(h.items)-1, item)
		return
	}
	if item.less(h.items[i]) {
		h.up(i, item)
	} else {
		h.down(i, item)
	}
}

// remove takes id out; it is no error if it is not in.
func (h *minHeap) remove(id uint32) {
	if !h.has(id) {
		return
	}
	i := int(h.pos[id]) - 1
	h.pos[id] = 0
	last := len(h.items) - 1
	moved := h.items[last]
	h.items = h.items[:last]
	if i == last {
		return
	}
	if i > 0 && moved.less(h.items[(i-1)/4]) {
		h.up(i, moved)
	} else {
		h.down(i, moved)
	}
}

// up puts item into the hole at i, or higher.
func (h *minHeap) up(i int, item heapItem) {
	for i > 0 {
		parent := (i - 1) / 4
		if !item.less(h.items[parent]) {
			break
		}
		h.put(i, h.items[parent])
		i = parent
	}
	h.put(i, item)
}

// down puts item into the hole at i, or lower.
func (h *minHeap) down(i int, item heapItem) {
	for {
		first := 4*i + 1
		if first >= len(h.items) {
			break
		}
		child := first
		for c := first + 1; c < min(first+4, len(h.items)); c++ {
			if h.items[c].less(h.items[child]) {
				child = c
			}
		}
		if !h.items[child].less(item) {
			break
		}
		h.put(i, h.items[child])
		i = child
	}
	h.put(i, item)
}

func (h *minHeap) put(i int, item heapItem) {
	h.items[i] = item
	h.pos[item.id] = int32(i + 1)
}

// grown returns s long enough to index i; new entries are zero. It doubles, so
// the cost per entry vanishes and stays away once every id has been seen.
func grown[T any](s []T, i int) []T {
	if i < len(s) {
		return s
	}
	bigger := make([]T, max(2*len(s), i+1, 16))
	copy(bigger, s)
	return bigger
}
