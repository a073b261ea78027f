// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"runtime"
	"sync"
	"sync/atomic"
	"weak"

	"google.golang.org/grpc/mem"
)

// countingPool counts what messages take on their way. The transport does not
// put back what a canceled call had received: such a buffer is counted until
// the garbage collector has it.
type countingPool struct {
	mem.BufferPool
	budget *budget
	known  sync.Map // weak.Pointer[[]byte] → *loan, for as long as the buffer lives
}

// loan is the state of one buffer: the bytes that it counts for, 0 while it
// lies in the pool.
type loan struct{ bytes atomic.Int64 }

func (p *countingPool) Get(n int) *[]byte {
	b := p.BufferPool.Get(n)
	key := weak.Make(b)
	v, found := p.known.Load(key)
	if !found {
		v = &loan{}
		p.known.Store(key, v)
		runtime.AddCleanup(b, p.forget, key)
	}
	size := int64(cap(*b))
	v.(*loan).bytes.Store(size)
	p.budget.used.Add(size)
	return b
}

func (p *countingPool) Put(b *[]byte) {
	if v, found := p.known.Load(weak.Make(b)); found {
		p.budget.used.Add(-v.(*loan).bytes.Swap(0))
	}
	p.BufferPool.Put(b)
}

// forget is called when a buffer is no more.
func (p *countingPool) forget(key weak.Pointer[[]byte]) {
	if v, found := p.known.LoadAndDelete(key); found {
		p.budget.used.Add(-v.(*loan).bytes.Swap(0))
	}
}
