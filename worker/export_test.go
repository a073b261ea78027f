// SPDX-License-Identifier: Apache-2.0

package worker

import "github.com/ringbatch/ringbatch/internal/inside"

// Inside is the inner side of a worker.
func (w *Worker) Inside() inside.Worker { return inner{w} }

// WriteReason is the midst of answering request i: a worker has seen that it is
// open, and writes why it failed.
func (b *Batch) WriteReason(i int, text string) { b.w.session.Board.SetReason(b.reqs[i].slot, text) }

// Mailed reports whether there is a batch to take.
func (w *Worker) Mailed() bool { return w.mail.Tail.Load() != w.next }

// Notes are differences between the model's policy and the worker's.
func (w *Worker) Notes() []string { return w.session.Info.Notes }
