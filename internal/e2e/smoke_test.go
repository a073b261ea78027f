package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/worker"
)

func TestSmoke(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "b.sock")
	mem := shm.NewHeap()
	b, err := broker.New(broker.Config{Socket: sock, OpenFolder: true, Memory: mem})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Add(2)
	go func() { defer wg.Done(); fmt.Println("serve", b.Serve(ctx)) }()
	in, _ := shm.ParseTensorSpec("x:f32[16]")
	out, _ := shm.ParseTensorSpec("y:f32[16]")
	wctx, wcancel := context.WithCancel(context.Background())
	go func() {
		defer wg.Done()
		err := worker.Serve(wctx, worker.Config{Socket: sock, Model: "echo", Memory: mem, Signature: shm.Signature{Inputs: []shm.TensorSpec{in}, Outputs: []shm.TensorSpec{out}}}, func(ctx context.Context, b *worker.Batch) error {
			for i := range b.Rows() {
				copy(b.Output(0).Bytes(i), b.Input(0).Bytes(i))
			}
			return nil
		})
		fmt.Println("worker", err)
	}()
	c, err := client.Dial(ctx, "echo", client.WithSocket(sock), client.WaitForModel(), client.WithMemory(mem), client.WithWindow(64))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	x := make([]float32, 16)
	for i := range 20000 {
		x[3] = float32(i)
		outs, err := c.Infer(ctx, x)
		if err != nil {
			t.Fatal(err)
		}
		y, _ := shm.As[float32](outs[0])
		if y[3] != float32(i) {
			t.Fatal("wrong", y)
		}
	}
	fmt.Println("per request", time.Since(start)/20000)
	start = time.Now()
	var g sync.WaitGroup
	for k := range 200 {
		g.Add(1)
		go func() {
			defer g.Done()
			x := make([]float32, 16)
			for i := range 500 {
				x[3] = float32(i * k)
				outs, err := c.Infer(ctx, x)
				if err != nil {
					t.Error(err)
					return
				}
				y, _ := shm.As[float32](outs[0])
				if y[3] != float32(i*k) {
					t.Error("wrong", y)
				}
			}
		}()
	}
	g.Wait()
	fmt.Println("per request, 200 goroutines", time.Since(start)/100000)
	c.Close()
	wcancel()
	cancel()
	wg.Wait()
}
