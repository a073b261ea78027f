// SPDX-License-Identifier: Apache-2.0

package auto

import "slices"

// followAnswers finds out whether clients send because they were answered. If so, a
// request of the replay follows its client's answer: of a client that keeps up to k
// requests in flight, request n follows answer n − k.
func (p *replay) followAnswers() {
	n := len(p.window)
	p.after = append(p.after[:0], make([]int32, n)...)
	p.pause = append(p.pause[:0], make([]Time, n)...)
	gaps, waits := Time(0), Time(0)
	var ends, starts []Time
	for i := range p.clients {
		first := p.clients[i].first
		starts, ends = starts[:0], ends[:0]
		for id := first; id >= 0; id = p.chain[id] {
			r := &p.window[id]
			if starts = append(starts, r.arrived); r.latency > 0 {
				ends = append(ends, r.arrived+r.latency)
			}
		}
		slices.Sort(ends)
		most := mostInFlight(starts, ends)
		k := 0
		for id := first; id >= 0; id = p.chain[id] {
			if from := k - most; from >= 0 && from < len(ends) {
				p.after[id] = int32(from + 1)
				p.pause[id] = max(0, starts[k]-ends[from])
				gaps += starts[k] - starts[from]
				waits += ends[from] - starts[from]
			}
			k++
		}
	}
	// Clients that wait for us for most of the time send because they were answered.
	p.closed = waits > 0 && gaps < 2*waits
	if !p.closed {
		clear(p.after)
	}
}

// mostInFlight is the most requests that were in flight at once.
func mostInFlight(starts, ends []Time) (most int) {
	ended := 0
	for i, at := range starts {
		for ended < len(ends) && ends[ended] <= at {
			ended++
		}
		most = max(most, i+1-ended)
	}
	return max(1, most)
}

// arrival is when the next request of a client comes.
type arrival struct {
	at     Time
	client int32
}

// arrivalHeap gives the earliest back, ties by client.
type arrivalHeap []arrival

func (h arrivalHeap) first() Time {
	if len(h) == 0 {
		return 1<<63 - 1
	}
	return h[0].at
}

func (h arrivalHeap) less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].client < h[j].client
}

func (h *arrivalHeap) push(x arrival) {
	*h = append(*h, x)
	a := *h
	for i := len(a) - 1; i > 0 && a.less(i, (i-1)/2); i = (i - 1) / 2 {
		a[i], a[(i-1)/2] = a[(i-1)/2], a[i]
	}
}

func (h *arrivalHeap) pop() int {
	a := *h
	client := a[0].client
	last := len(a) - 1
	a[0] = a[last]
	a = a[:last]
	for i := 0; ; {
		child := 2*i + 1
		if child >= last {
			break
		}
		if child+1 < last && a.less(child+1, child) {
			child++
		}
		if !a.less(child, i) {
			break
		}
		a[i], a[child] = a[child], a[i]
		i = child
	}
	*h = a
	return int(client)
}
