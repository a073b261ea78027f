// SPDX-License-Identifier: Apache-2.0

package client_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/status"
)

// inLine is a context that tells when a Claim waits: then Claim asks for Done.
type inLine struct {
	context.Context
	waits chan struct{}
}

func (c inLine) Done() <-chan struct{} {
	select {
	case c.waits <- struct{}{}:
	default:
	}
	return c.Context.Done()
}

// queue begins a Claim of that many rows, and returns once it waits.
func queue(ctx context.Context, c *client.Client, rows int, then func(client.Request, error)) {
	in := inLine{ctx, make(chan struct{}, 1)}
	go func() { then(c.Claim(in, rows)) }()
	<-in.waits
}

func TestClaimsOfEqualRowsAreServedInOrder(t *testing.T) {
	c := newRing(t, plain(t)).dial(client.WithWindow(1))
	first, err := c.Claim(soon(t), 1)
	expect(t, "the first claim", err, nil)
	served := make(chan int)
	var want, got []int
	for i := range 20 {
		queue(soon(t), c, 1, func(r client.Request, err error) {
			served <- i
			expect(t, "claim and release", errors.Join(err, r.Release()), nil)
		})
		want = append(want, i)
	}
	_, err = c.TryClaim(1)
	expect(t, "a claim that does not wait", err, status.ErrFull)
	expect(t, "release", first.Release(), nil)
	for range want {
		got = append(got, <-served)
	}
	if !slices.Equal(got, want) {
		t.Errorf("served %d", got)
	}
}

func TestAClaimThatGivesUpNoLongerHoldsUpTheOthers(t *testing.T) {
	c := newRing(t, plain(t)).dial(client.WithWindow(2))
	first, err := c.Claim(soon(t), 1)
	expect(t, "the first claim", err, nil)
	large, giveUp := context.WithCancel(soon(t))
	ended := make(chan error, 1)
	queue(large, c, 2, func(_ client.Request, err error) { ended <- err })
	giveUp()
	expect(t, "the large claim", <-ended, status.ErrFull, context.Canceled)
	_, err = c.TryClaim(1)
	expect(t, "the other slot", err, nil)
	expect(t, "release", first.Release(), nil)
}
