package broker

// windows leases ranges of consecutive slots, lowest first.
type windows struct {
	used []bool
	free int // slots that no client has
}

func newWindows(slots int) windows { return windows{make([]bool, slots), slots} }

func (w *windows) lease(n int) (uint32, bool) {
	run := 0
	for i, used := range w.used {
		if used {
			run = 0
			continue
		}
		if run++; run == n {
			first := i - n + 1
			for j := first; j <= i; j++ {
				w.used[j] = true
			}
			w.free -= n
			return uint32(first), true
		}
	}
	return 0, false
}

func (w *windows) giveBack(first uint32, n int) {
	for i := range n {
		w.used[int(first)+i] = false
	}
	w.free += n
}
