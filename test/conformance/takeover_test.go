// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/tensor"
)

// A client attaches to the old broker until the new broker has the socket, and then to
// the new one.
func TestBothClientsFindABrokerDuringATakeOver(t *testing.T) {
	for _, language := range []string{"Go", "C"} {
		t.Run(language, func(t *testing.T) {
			sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
			must.Do(t, err)
			cfg := broker.Config{OpenFolder: true, Models: []broker.ModelConfig{{Name: "m", Signature: sig}}}
			old := ringbatchtest.Start(t, cfg)
			c := start(t, language, old.Socket())
			given, take := make(chan error, 1), make(chan struct{})
			cfg.Socket = old.Socket()
			cfg.TakeOver = func(ctx context.Context) error {
				err := admin.New(cfg.Socket).HandOver(ctx)
				given <- err
				<-take
				return err
			}
			ringbatchtest.Start(t, cfg)
			must.Do(t, <-given)
			before, err := os.Stat(cfg.Socket)
			must.Do(t, err)
			c.do(t, "connect m 4", "OK")
			c.do(t, "close", "OK")
			close(take)
			for after := before; os.SameFile(before, after); time.Sleep(time.Millisecond) {
				if after, err = os.Stat(cfg.Socket); err != nil {
					t.Fatal(err)
				}
			}
			c.do(t, "connect m 4", "OK")
			b, err := admin.New(cfg.Socket).Stats(t.Context())
			if err != nil || len(b.Models) != 1 || b.Models[0].Clients != 1 {
				t.Errorf("the broker that took over has %+v, %v", b, err)
			}
		})
	}
}
