// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"slices"

	"github.com/ringbatch/ringbatch/internal/attach"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
)

// inner is the inside.Worker of a Worker.
type inner struct{ *Worker }

func (w inner) Session() *attach.Session {
	w.direct.Store(true)
	return w.session
}

func (w inner) Settings() policy.Settings { return w.session.Settings }

func (w inner) SetLanes(n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.mail.Lanes.Store(uint32(min(max(n, 1), w.session.Info.Depth)))
	}
}

func (w inner) Polite() { w.parker.Polite = true }

func (w inner) Leave() { w.leave() }

func (w inner) Abandon() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
}

// leave is Close without unmapping.
func (w *Worker) leave() {
	w.mu.Lock()
	left := slices.Clone(w.taken)
	w.mu.Unlock()
	w.session.Synchronize() // GPU kernels may still write outputs of these requests
	why := errClosed
	if w.gone.Load() { // the clients may send the requests again
		why = status.ErrBrokerGone
	}
	for _, b := range left {
		if b.beginAnswer() {
			b.failAll(why, false)
			b.answer()
		}
	}
	w.mu.Lock()
	for len(w.taken) > 0 { // another goroutine is completing it
		w.idle.Wait()
	}
	w.mu.Unlock()
	w.session.HangUp()
	w.watch.Wait()
}
