// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"context"
	"fmt"
	"log"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client/ringbatchtest"
	"github.com/ringbatch/ringbatch/tensor"
)

// serveDouble runs a broker with one model, as another process of the host
// would. It returns the broker's socket.
func serveDouble() (socket string, stop func()) {
	sig, err := tensor.ParseSignature([]string{"x:f32[4]"}, []string{"y:f32[4]"})
	if err != nil {
		log.Fatal(err)
	}
	b, err := ringbatchtest.Open(broker.Config{Models: []broker.ModelConfig{{Name: "double", Signature: sig}}})
	if err != nil {
		log.Fatal(err)
	}
	return b.Socket(), func() { _ = b.Close() }
}

func Example() {
	socket, stop := serveDouble()
	defer stop()
	ctx := context.Background()

	a := admin.New(socket)
	if err := a.Set(ctx, "double", map[string]string{"wait_time": "3ms"}); err != nil {
		log.Fatal(err)
	}
	models, err := a.Models(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range models {
		fmt.Println(m.Name, m.Signature.String(), "wait_time", m.Policy["wait_time"], "workers", m.Workers)
	}
	// Output: double x:f32[4] -> y:f32[4] wait_time 3ms workers 0
}

// Follow the broker's models without asking again and again.
func ExampleClient_Changed() {
	socket, stop := serveDouble()
	defer stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()

	a := admin.New(socket)
	var known uint64 // 0: the first call returns at once
	for {
		now, err := a.Changed(ctx, known)
		if err != nil {
			break // ctx has ended, or the broker has gone: try again later
		}
		known = now
		models, err := a.Models(ctx)
		if err != nil {
			break
		}
		fmt.Println(len(models), "model")
		cancel() // enough for an example
	}
	// Output: 1 model
}
