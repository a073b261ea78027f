// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"math/rand"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testbed"
)

// nonce is unlike any other request's of this process.
var nonce atomic.Int64

// ask runs one request and checks every number of its answer.
func ask(ctx context.Context, c *client.Client, cmd, arg int64, rows int) error {
	return askSized(ctx, c, testbed.Width, cmd, arg, rows)
}

func askSized(ctx context.Context, c *client.Client, width int, cmd, arg int64, rows int) error {
	x := make([]int64, width*rows)
	n := nonce.Add(1)
	rng := rand.New(rand.NewSource(n))
	for r := range rows {
		row := x[r*width : (r+1)*width]
		for j := range row {
			row[j] = rng.Int63()
		}
		row[0], row[1], row[2] = 0, n, arg
	}
	x[0] = cmd
	return testbed.Ask(ctx, c, x, width)
}

// asking is a request under way.
type asking chan error

func askLater(ctx context.Context, c *client.Client, cmd, arg int64) asking {
	ch := make(asking, 1)
	go func() { ch <- ask(ctx, c, cmd, arg, 1) }()
	return ch
}

// ends waits for the request's one end and compares it with want, nil being a
// correct answer.
func (a asking) ends(t *testing.T, want error) {
	t.Helper()
	select {
	case err := <-a:
		if !errors.Is(err, want) {
			t.Errorf("request ended with %v, expected %v", err, want)
		}
	case <-time.After(patience):
		t.Fatalf("request has no end, expected %v", want)
	}
}

// works sends some requests and expects correct answers.
func works(t *testing.T, c *client.Client, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var all []asking
	for range n {
		all = append(all, askLater(ctx, c, cmdAnswer, 0))
	}
	for _, a := range all {
		a.ends(t, nil)
	}
}

func background(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}
