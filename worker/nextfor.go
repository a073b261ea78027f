package worker

import (
	"time"

	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
)

// NextFor is Next for at most d: ErrTimeout if no batch comes. It allocates
// nothing and sets no timer.
func (w *Worker) NextFor(d time.Duration) (*Batch, error) {
	until := shm.Now() + int64(d)
	for {
		seen := w.mail.Bell.Load()
		if b, err := w.TryNext(); b != nil || err != nil {
			return b, err
		}
		left := until - shm.Now()
		if left <= 0 {
			return nil, status.ErrTimeout
		}
		if !w.spin.Until(w.awake, until) {
			w.mail.Wait(&w.parker, seen, w.next, time.Duration(left))
		}
	}
}
