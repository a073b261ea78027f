// SPDX-License-Identifier: Apache-2.0

package engine

import "container/heap"

// timers are the stages with a due time, as a heap.
type timers []*Stage

// setTimer sets when the stage is due, or removes it from the heap.
func (t *timers) setTimer(s *Stage, due int64) {
	was := s.timer
	s.due = due
	switch {
	case due == never && was >= 0:
		heap.Remove(t, was)
	case due != never && was < 0:
		heap.Push(t, s)
	case was >= 0:
		heap.Fix(t, was)
	}
}

func (t timers) nextDue() int64 {
	if len(t) == 0 {
		return never
	}
	return t[0].due
}

func (t timers) Len() int           { return len(t) }
func (t timers) Less(i, j int) bool { return t[i].due < t[j].due }

func (t timers) Swap(i, j int) {
	t[i], t[j] = t[j], t[i]
	t[i].timer, t[j].timer = i, j
}

func (t *timers) Push(x any) {
	s := x.(*Stage)
	s.timer = len(*t)
	*t = append(*t, s)
}

func (t *timers) Pop() any {
	last := len(*t) - 1
	s := (*t)[last]
	(*t)[last], *t = nil, (*t)[:last]
	s.timer = -1
	return s
}
