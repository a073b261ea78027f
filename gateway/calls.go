// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/client"
)

// Calls are used again: most of a small request's cost would be making them.
var calls = sync.Pool{New: func() any { return new(call) }}

func newCall() *call {
	c := calls.Get().(*call)
	c.level, c.began = -1, time.Now()
	return c
}

// done ends a call, however it went.
func (c *call) done() {
	c.release()
	for i := range c.inputs {
		c.inputs[i].src = nil
	}
	for i := range c.outputs {
		clear(c.outputs[i].parts)
	}
	c.model, c.caller, c.watch, c.onFilled, c.id, c.request = nil, nil, nil, nil, "", client.Request{}
	c.inputs, c.outputs, c.dims = c.inputs[:0], c.outputs[:0], c.dims[:0]
	c.timeout, c.binary, c.rows = 0, false, 0
	c.relayed.reset()
	c.filled, c.ended, c.queue, c.compute = time.Time{}, time.Time{}, 0, 0
	calls.Put(c)
}
