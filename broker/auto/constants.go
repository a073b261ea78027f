// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// Time is the batcher's.
type Time = batcher.Time

// What is remembered.
const (
	// maxRequests is how many of the latest requests are remembered.
	maxRequests = 4096
	// maxShapes have a cost table of their own; further shapes share the last.
	maxShapes = 16
	// maxOthers is the number of other busy workers that costs tell apart.
	maxOthers = 7
	// remembered is how far back a replay reaches.
	remembered = Time(time.Second)
)

// When to replay, and for how long.
const (
	// fewRequests is the least number of requests that a replay needs.
	fewRequests = 16
	// enoughRequests of enoughBatches short batches are enough for a replay.
	enoughRequests, enoughBatches = 384, 64
	// evaluateEach is the least time between two evaluations.
	evaluateEach = Time(10 * time.Millisecond)
	// stepEach is the time in which a replay may go one step of 0.15 µs; in a hurry it may go
	// hurry steps.
	stepEach, hurry = Time(8 * time.Microsecond), 8
	// maxSteps is how many steps one call of Learn may go.
	maxSteps = 128
)

// Which plan to take.
const (
	// forgottenAfter is the time in which an old result fades to 1/e.
	forgottenAfter = Time(1500 * time.Millisecond)
	// luck is how much better a single replay may look by chance.
	luck = 0.03
	// tailWeight is the weight of the root mean square beside the mean.
	tailWeight = 0.1
	// serialFill is how full batches may be, on average, to go one at a time.
	serialFill = 0.6
	// overdue times its expected time after its start a batch holds back no other.
	overdue = 3
	// lateShare of the requests may miss the latency goal in a replay.
	lateShare = 0.006
)

// What batches cost, and what is late.
const (
	// farOff times longer or shorter than expected is far off.
	farOff = 1.4
	// young is the number of batches until a cost is trusted.
	young = 4
	// margin times as long as expected a request is assumed to take.
	margin = 1.04
)
