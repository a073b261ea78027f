// SPDX-License-Identifier: Apache-2.0

// Package backoff makes the pauses between attempts to reach a broker.
package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// Pauses double from First to Last.
const (
	First = 2 * time.Millisecond
	Last  = 500 * time.Millisecond
)

// Backoff knows how often an attempt failed. The zero value is before the first.
type Backoff struct{ next time.Duration }

// Next is the next pause. The jitter of ± a quarter keeps peers apart that lost the
// same broker.
func (b *Backoff) Next() time.Duration {
	d := max(b.next, First)
	b.next = min(2*d, Last)
	return d*3/4 + rand.N(d/2)
}

// Wait pauses until the next attempt. It returns false if ctx ends first.
func (b *Backoff) Wait(ctx context.Context) bool { return Pause(ctx, b.Next()) }

// Pause returns false if ctx ends within d.
func Pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
