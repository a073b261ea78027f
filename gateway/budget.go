// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/http"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
)

// budget counts bytes that callers make the gateway hold in its own memory.
type budget struct {
	used  atomic.Int64
	most  int64
	short atomic.Bool // somebody was refused or waits: the next sweep looks who holds what is used
}

// take counts n bytes, or refuses them.
func (b *budget) take(n int) error {
	if b.used.Add(int64(n)) > b.most {
		b.used.Add(-int64(n))
		b.short.Store(true)
		return refuse(http.StatusTooManyRequests, codes.ResourceExhausted, "the gateway's buffers are full (%d MiB of requests on their way), try again", b.most>>20)
	}
	return nil
}

func (b *budget) giveBack(n int) { b.used.Add(-int64(n)) }

func (b *budget) full() bool { return b.used.Load() >= b.most }

func tooLarge(n int64, most int) error {
	return refuse(http.StatusRequestEntityTooLarge, codes.ResourceExhausted, "a message of %d bytes; the gateway takes %d at most", n, most)
}

// seldom does a thing at most once a second.
type seldom struct{ last atomic.Int64 }

func (s *seldom) Do(f func()) {
	now, last := time.Now().UnixNano(), s.last.Load()
	if now-last >= int64(time.Second) && s.last.CompareAndSwap(last, now) {
		f()
	}
}
