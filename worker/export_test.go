// SPDX-License-Identifier: Apache-2.0

package worker

// WriteReason is the midst of answering request i: a worker has seen that it is
// open, and writes why it failed.
func (b *Batch) WriteReason(i int, text string) { b.w.session.Board.SetReason(b.reqs[i].slot, text) }

// Mailed reports whether there is a batch to take.
func (w *Worker) Mailed() bool { return w.mail.Tail.Load() != w.next }
