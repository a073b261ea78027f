// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// doSequence runs a command about the sequence whose number it names first.
func (d *driver) doSequence(what, rest string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	fields := strings.Fields(rest)
	var n []int // s0 r1 2: 0, 1, 2
	for _, f := range fields {
		i, _ := strconv.Atoi(strings.TrimLeft(f, "sr"))
		n = append(n, i)
	}
	at := &d.sequences[n[0]]
	q, err := *at, error(nil)
	switch what {
	case "open":
		*at, err = d.client.Sequence(ctx, n[1])
	case "begin":
		d.requests[n[1]], err = q.Request(ctx)
	case "step":
		var y []tensor.Tensor
		if y, err = q.Step(ctx, []float32{float32(n[1])}); err == nil {
			return first(y[0])
		}
	case "state":
		var h tensor.Tensor
		if h, err = q.State(ctx, d.client.Model().Signature.State[0].Name); err == nil {
			return first(h)
		}
	case "undo":
		q.Undo()
	case "reset":
		err = q.Reset(n[1:]...)
	case "copy":
		d.sequences[n[1]], err = q.Copy(ctx)
	case "end":
		err = q.Close()
	}
	return name(err)
}

func first(t tensor.Tensor) string {
	x, err := tensor.As[float32](t)
	if err != nil {
		return name(err)
	}
	return fmt.Sprintf("OK %g", x[0])
}

func (d *driver) version(r *client.Request) string {
	v, err := r.Version()
	if err != nil {
		return name(err)
	}
	return fmt.Sprintf("OK %d", v)
}

// sum answers with the state plus the input, which is the next state.
func (d *driver) sum() error {
	for i := range d.batch.Rows() {
		sum := worker.Row[float32](d.batch.State(0), i)[0] + worker.Row[float32](d.batch.Input(0), i)[0]
		worker.Row[float32](d.batch.NextState(0), i)[0] = sum
		worker.Row[float32](d.batch.Output(0), i)[0] = sum
	}
	return d.batch.Complete()
}
