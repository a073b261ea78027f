// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"hash/fnv"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/policy"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// roleFlags are those of the processes on the hosts.
type roleFlags struct {
	cost     time.Duration
	requests int
	first    uint64
	inFlight int
	deadline time.Duration
	poison   int
	ends     []string
}

func (r *roleFlags) add(f *pflag.FlagSet) {
	f.DurationVar(&r.cost, "cost", 40*time.Millisecond, "internal: of a batch; long enough that the hosts bound the throughput, not this machine")
	f.IntVar(&r.requests, "count", 0, "internal: requests of this producer")
	f.Uint64Var(&r.first, "first", 0, "internal: number of its first")
	f.IntVar(&r.inFlight, "in_flight", 256, "internal: of this producer")
	f.DurationVar(&r.deadline, "deadline", 5*time.Second, "internal: of each request")
	f.IntVar(&r.poison, "poison", 0, "internal: every so many requests one kills its worker")
	f.StringSliceVar(&r.ends, "ends", nil, "internal: namespace and device of both ends of a cable")
	for _, name := range []string{"role", "cost", "count", "first", "in_flight", "deadline", "poison", "ends"} {
		_ = f.MarkHidden(name)
	}
}

const (
	inputBytes = 64
	maxBatch   = 32
	poisonMark = 0xdeadbeefdeadbeef
)

// checksum is the model: what is answered to an input.
func checksum(input []byte) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(input)
	return h.Sum64()
}

func modelSignature() (tensor.Signature, error) {
	return tensor.ParseSignature([]string{"x:u8[64]"}, []string{"y:i64[1]"})
}

// serveModel answers checksums. SIGUSR1 makes it ten times as slow, SIGUSR2 as
// quick as before; a poisonous input kills it.
func serveModel(ctx context.Context, r *roleFlags) error {
	sig, err := modelSignature()
	if err != nil {
		return err
	}
	var factor atomic.Int64
	factor.Store(1)
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
	go func() {
		for s := range signals {
			factor.Store(1)
			if s == syscall.SIGUSR1 {
				factor.Store(10)
			}
		}
	}()
	return worker.Serve(ctx, worker.Config{Model: "m", Signature: sig, WaitForBroker: 2 * time.Minute, Policy: policy.New(policy.MaxBatchSize(maxBatch), policy.WaitTime(0), policy.Slots(4096))},
		func(_ context.Context, b *worker.Batch) error {
			for i := range b.Rows() {
				in := b.Input(0).Bytes(i)
				if binary.LittleEndian.Uint64(in[8:]) == poisonMark {
					os.Exit(66)
				}
				binary.LittleEndian.PutUint64(b.Output(0).Bytes(i), checksum(in))
			}
			time.Sleep(r.cost * time.Duration(factor.Load()))
			return nil
		})
}

// report is what a producer saw.
type report struct {
	Innocent  map[string]int    `json:"innocent"`  // requests by their ends
	Poisonous map[string]int    `json:"poisonous"` // and those that kill the worker that runs them
	Why       map[string]string `json:"why"`       // the first text of each failure
	Late      int               `json:"late"`      // ended more than 100 ms after their deadline, and
	Excused   int               `json:"excused"`   // those of which the machine kept even a sleeping process waiting so long
	Begin     int64             `json:"begin"`     // Unix milliseconds
	Answers   []int             `json:"answers"`   // in each tenth of a second since
	Slowest   float64           `json:"slowest"`   // seconds
}

// Ends of requests that have no status's name.
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

// graceful is how long after its deadline a request may end.
const graceful = 100 * time.Millisecond

func produce(ctx context.Context, r *roleFlags) error {
	wait, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	c, err := client.Dial(wait, "m", client.WithWindow(r.inFlight), client.WaitForModel())
	if err != nil {
		return err
	}
	defer c.Close()
	idle := newCanary(ctx)
	rep := report{Innocent: map[string]int{}, Poisonous: map[string]int{}, Why: map[string]string{}, Begin: time.Now().UnixMilli()}
	begin := time.Now()
	var mu sync.Mutex
	var next atomic.Int64
	var all sync.WaitGroup
	for range r.inFlight {
		all.Go(func() {
			for ctx.Err() == nil {
				n := next.Add(1) - 1
				if n >= int64(r.requests) {
					return
				}
				var input [inputBytes]byte
				binary.LittleEndian.PutUint64(input[:], r.first+uint64(n))
				poisonous := r.poison > 0 && n%int64(r.poison) == int64(r.poison)-1
				if poisonous {
					binary.LittleEndian.PutUint64(input[8:], poisonMark)
				}
				sent := time.Now()
				right, err := ask(ctx, c, input[:], r.deadline)
				took := time.Since(sent)
				mu.Lock()
				for bucket := int(time.Since(begin) / (100 * time.Millisecond)); len(rep.Answers) <= bucket; {
					rep.Answers = append(rep.Answers, 0)
				}
				rep.Slowest = max(rep.Slowest, took.Seconds())
				if took > r.deadline+graceful {
					// Two processes have to run in time: the broker that ends it, and this one.
					if took > r.deadline+graceful+2*idle.since(sent.Add(r.deadline-tenth)) {
						rep.Late++
					} else {
						rep.Excused++
					}
				}
				end := endOf(right, err)
				if poisonous {
					rep.Poisonous[end]++
				} else {
					rep.Innocent[end]++
				}
				if err != nil && rep.Why[end] == "" {
					rep.Why[end] = err.Error()
				}
				if end == endRight {
					rep.Answers[len(rep.Answers)-1]++
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return json.NewEncoder(os.Stdout).Encode(rep)
}

// ask sends one request and tells whether the answer is right.
func ask(ctx context.Context, c *client.Client, input []byte, deadline time.Duration) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	q, err := c.Claim(ctx, 1)
	if err != nil {
		return false, err
	}
	defer q.Release()
	in, err := q.InputBytes(0)
	if err != nil {
		return false, err
	}
	copy(in, input)
	if err := q.Commit(ctx); err != nil {
		return false, err
	}
	if err := q.Wait(ctx); err != nil {
		return false, err
	}
	out, err := q.OutputBytes(0)
	return err == nil && binary.LittleEndian.Uint64(out) == checksum(input), err
}
