// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"io"
	"slices"
	"time"

	"github.com/ringbatch/ringbatch/bench/rig"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// partsEvery is the time between the parts of an answer, in which the client parks.
const partsEvery = 200 * time.Microsecond

var partsSignature = tensor.Signature{
	Inputs:  []tensor.Spec{{Name: "n", DType: tensor.I64}},
	Outputs: []tensor.Spec{{Name: "y", DType: tensor.I64, Shape: []int{4096}, Variable: []int{0}}},
}

// measureParts has one worker that shows a part of 8 bytes every 200 µs, and one client: the time from
// the show to the client, against one way of the futex round trip.
func measureParts(r *rig.Rig) {
	const parts = 2000 // per round
	futexes := startFutexes(r)
	_, socket := r.StartBroker("parts.sock")
	r.MustStart(testbed.Spec{Role: "parts worker", Job: socket, Procs: 2})
	reader := []*testbed.Process{r.MustStart(testbed.Spec{Role: "parts reader", Job: socket, Procs: 2})}
	var medians, p99s, futex []float64
	r.InTurns("parts", func(counts bool) {
		o := rig.OrderAll[outcome](r, reader, order{Count: parts})[0]
		trip := float64(rig.OrderAll[int64](r, futexes, 4000)[1]) / 1e3
		if counts {
			medians, p99s, futex = append(medians, float64(o.Nanos)/1e3), append(p99s, float64(o.P99)/1e3), append(futex, trip/2)
		}
	})
	r.Check("part_us", rig.Median(medians), "<=", 60, "from show to client (p99 %.1f); one way of a futex round trip %.1f µs; median of %d rounds",
		rig.Median(p99s), rig.Median(futex), len(medians))
}

// partsWorker appends the time to its answers.
func partsWorker(c *testbed.Child, socket string) error {
	cfg := worker.Config{Socket: socket, Model: "parts", Signature: partsSignature, Attached: func() { _ = c.Ready() }}
	return worker.Serve(c.Context(), cfg, func(_ context.Context, b *worker.Batch) error {
		y := worker.Row[int64](b.Output(0), 0)
		for i := range worker.Row[int64](b.Input(0), 0)[0] {
			for next := shm.Now() + int64(partsEvery); shm.Now() < next; {
				time.Sleep(partsEvery / 2)
			}
			y[i] = shm.Now()
			if err := b.Show(0, int(i)+1); err != nil {
				return err
			}
		}
		return nil
	})
}

func partsReader(c *testbed.Child, socket string) error {
	ctx := context.Background()
	s, err := client.Dial(ctx, "parts", client.WithSocket(socket), client.WaitForModel())
	if err != nil {
		return err
	}
	return testbed.Serve(c, func(o order) (outcome, error) {
		var ns []int64
		for part, err := range s.Stream(ctx, []int64{int64(o.Count)}) {
			now := shm.Now()
			if err != nil {
				return outcome{}, err
			}
			shown, err := tensor.As[int64](part.Tensor)
			if err != nil || len(shown) == 0 {
				return outcome{}, errors.Join(err, io.ErrUnexpectedEOF)
			}
			ns = append(ns, now-shown[0])
		}
		slices.Sort(ns)
		return outcome{Requests: len(ns), Nanos: ns[len(ns)/2], P99: ns[len(ns)*99/100]}, nil
	})
}
