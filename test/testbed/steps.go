// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/tensor"
)

// The steps of a request, in order.
const (
	StepClaim   = "claim"
	StepWrite   = "write" // half of the input is written
	StepCommit  = "commit"
	StepRead    = "read" // answered
	StepRelease = "release"
)

// StepByStep sends one request whose input is x and zeros after it. It calls at after
// each step, where the caller may stop or die.
func StepByStep(ctx context.Context, c *client.Client, rows int, x []int64, at func(step string)) error {
	req, err := c.Claim(ctx, rows)
	if err != nil {
		return err
	}
	at(StepClaim)
	view, err := req.Input("x")
	if err != nil {
		return err
	}
	input, err := tensor.As[int64](view)
	if err != nil {
		return err
	}
	clear(input)
	n := copy(input, x[:len(x)/2])
	at(StepWrite)
	copy(input[n:], x[n:])
	if err := req.Commit(ctx); err != nil {
		return err
	}
	at(StepCommit)
	if err := req.Wait(ctx); err != nil {
		return err
	}
	at(StepRead)
	if err := req.Release(); err != nil {
		return err
	}
	at(StepRelease)
	return nil
}
