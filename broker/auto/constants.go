// SPDX-License-Identifier: Apache-2.0

package auto

import (
	"time"

	"github.com/ringbatch/ringbatch/broker/batcher"
)

// Time is the batcher's: nanoseconds.
type Time = batcher.Time

// Memory.
const (
	maxRequests = 4096              // the latest requests
	remembered  = Time(time.Second) // how far back a replay reaches
	maxShapes   = 16                // shapes with separate cost tables; further shapes share the last
	maxOthers   = 7                 // other busy workers that costs distinguish
	exactSizes  = 32                // rows up to which costs distinguish every size
)

// When to replay, and for how long.
const (
	fewRequests    = 16                         // a replay needs at least
	enoughRequests = 384                        // a replay needs at most, if they are of
	enoughBatches  = 64                         // times an average batch
	stepEach       = Time(8 * time.Microsecond) // a replay may go one step of 0.15 µs in that time: 2 % of a core
	hurry          = 2                          // times as many steps, for a second after a change: 4 % of a core
	maxSteps       = 128                        // in one call of Learn
)

// Which plan to take.
const (
	forgottenAfter = Time(1500 * time.Millisecond) // an old result has faded to 1/e
	luck           = 0.03                          // a single replay may look better by that share
	longestWait    = 2.5                           // times an average batch
	mostFill       = 0.6                           // share of max_batch_size, of batches that go one at a time
	overdue        = 3                             // times its expected time: then a batch holds back no other
	lateShare      = 0.006                         // of the requests may miss the latency goal or their deadlines
)

// Costs of batches, and late requests.
const (
	farOff  = 1.4  // times as long as expected, or as short
	young   = 4    // batches until a cost is trusted
	caution = 0.05 // added to the expected time of a request at first, and again after each late batch
)
