// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/internal/testbed"
	"github.com/ringbatch/ringbatch/tensor"
)

// Who comes when one broker has given the socket up and the other has not taken it yet
// waits, and attaches to the other.
func TestBothClientsWaitForTheBrokerThatTakesOver(t *testing.T) {
	for _, language := range []string{"Go", "C"} {
		t.Run(language, func(t *testing.T) {
			sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
			if err != nil {
				t.Fatal(err)
			}
			cfg := broker.Config{OpenFolder: true, Models: []broker.ModelConfig{{Name: "m", Signature: sig}}}
			old, err := testbed.StartLocal(cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = old.Close() })
			c := start(t, language, old.Socket())
			given, take := make(chan error, 1), make(chan struct{})
			cfg.Socket = old.Socket()
			cfg.TakeOver = func(ctx context.Context) error {
				err := admin.New(cfg.Socket).HandOver(ctx)
				given <- err
				<-take
				return err
			}
			next, err := testbed.StartLocal(cfg)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = next.Close() })
			if err := <-given; err != nil {
				t.Fatal(err)
			}
			fmt.Fprintln(c.in, "connect m 4")
			select {
			case line := <-c.lines:
				t.Errorf("nobody takes clients now, yet: %s", line)
			case <-time.After(100 * time.Millisecond):
			}
			close(take)
			if got := c.answer(); got != "OK" {
				t.Errorf("connect: %s", got)
			}
			b, err := admin.New(cfg.Socket).Stats(t.Context())
			if err != nil || len(b.Models) != 1 || b.Models[0].Clients != 1 {
				t.Errorf("the broker that took over has %+v, %v", b, err)
			}
		})
	}
}
