// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/fnv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

const (
	inputBytes = 64
	maxBatch   = 32
	inFlight   = 256                   // of a producer
	batchCost  = 40 * time.Millisecond // long enough that the hosts bound the throughput, not this machine
)

// checksum is the model's answer to an input.
func checksum(input []byte) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(input)
	return h.Sum64()
}

// serveModel answers checksums. A command is the factor by which it is slower
// from then on.
func serveModel(c *testbed.Child) error {
	sig, err := tensor.ParseSignature([]string{"x:u8[64]"}, []string{"y:i64[1]"})
	if err != nil {
		return err
	}
	var factor atomic.Int64
	factor.Store(1)
	go func() {
		for m := range c.Commands() {
			var n int64
			if json.Unmarshal(m, &n) == nil {
				factor.Store(n)
			}
		}
	}()
	cfg := worker.Config{Model: "m", Signature: sig, WaitForBroker: 2 * time.Minute,
		Policy: policy.New(policy.MaxBatchSize(maxBatch), policy.WaitTime(0), policy.Slots(4096))}
	return worker.Serve(c.Context(), cfg, func(_ context.Context, b *worker.Batch) error {
		for i := range b.Rows() {
			binary.LittleEndian.PutUint64(b.Output(0).Bytes(i), checksum(b.Input(0).Bytes(i)))
		}
		time.Sleep(batchCost * time.Duration(factor.Load()))
		return nil
	})
}

// produceJob describes a producer.
type produceJob struct {
	First    uint64 // number of its first request
	Requests int
	Deadline time.Duration // of each
}

// report counts the ends of a producer's requests.
type report struct {
	Ends    map[string]int    // requests by their ends
	Why     map[string]string // the first text of each failure
	Late    int               // ended more than 100 ms after their deadline
	Excused int               // the same, but the machine did not run a sleeping process for that long
	Begin   time.Time
	Answers []int // in each tenth of a second since
	Slowest time.Duration
}

// Ends of requests without a status.
const (
	endRight = "right"
	endWrong = "wrong"
)

// endOf names the end of a request.
func endOf(right bool, err error) string {
	var code status.Code
	switch {
	case errors.As(err, &code):
		return code.Name()
	case err != nil:
		return err.Error()
	case !right:
		return endWrong
	}
	return endRight
}

const (
	graceful = 100 * time.Millisecond // how long after its deadline a request may end
	tenth    = 100 * time.Millisecond
)

func produce(child *testbed.Child, job produceJob) error {
	ctx := child.Context()
	wait, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	c, err := client.Dial(wait, "m", client.WithWindow(inFlight), client.WaitForModel())
	if err != nil {
		return err
	}
	defer c.Close()
	stalls := testbed.WatchStalls(nil, true)
	rep := report{Ends: map[string]int{}, Why: map[string]string{}, Begin: time.Now()}
	var mu sync.Mutex
	var next atomic.Int64
	var all sync.WaitGroup
	for range inFlight {
		all.Go(func() {
			for ctx.Err() == nil {
				n := next.Add(1) - 1
				if n >= int64(job.Requests) {
					return
				}
				var input [inputBytes]byte
				binary.LittleEndian.PutUint64(input[:], job.First+uint64(n))
				sent := time.Now()
				right, err := ask(ctx, c, input[:], job.Deadline)
				due := sent.Add(job.Deadline)
				mu.Lock()
				// Two processes have to run in time: the broker, which ends the request, and this one.
				stalled := 2 * stalls.Longest(due.Add(-tenth), time.Now())
				rep.count(endOf(right, err), err, time.Since(sent), time.Since(due), stalled)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return child.Tell("report", rep)
}

func (r *report) count(end string, err error, took, late, stalled time.Duration) {
	for bucket := int(time.Since(r.Begin) / tenth); len(r.Answers) <= bucket; {
		r.Answers = append(r.Answers, 0)
	}
	r.Slowest = max(r.Slowest, took)
	switch {
	case late <= graceful:
	case late > graceful+stalled:
		r.Late++
	default:
		r.Excused++
	}
	r.Ends[end]++
	if err != nil && r.Why[end] == "" {
		r.Why[end] = err.Error()
	}
	if end == endRight {
		r.Answers[len(r.Answers)-1]++
	}
}

// ask sends one request and reports whether the answer is right.
func ask(ctx context.Context, c *client.Client, input []byte, deadline time.Duration) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	outs, err := c.Infer(ctx, input)
	if err != nil {
		return false, err
	}
	y, err := tensor.As[int64](outs[0])
	return err == nil && uint64(y[0]) == checksum(input), err
}
