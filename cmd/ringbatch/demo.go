// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/client"
)

func runDemo(ctx context.Context, args []string) error {
	f := flags("demo", "", `Start a broker with two models and their workers, load them with clients that come and go, and serve
the dashboard. Ctrl-C ends all of it.`, "  ringbatch demo\n")
	port := f.Uint16("http", 8002, "`PORT` of the page, on this host only; 0: any free port")
	if err := parse(f, args, 0, 0); err != nil {
		return err
	}
	l, err := listenHere(*port)
	if err != nil {
		return err
	}
	defer l.Close()
	dir, err := os.MkdirTemp("", "ringbatch-demo")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := &demo{socket: filepath.Join(dir, "broker.sock")}
	token := rand.Text()
	tokens := filepath.Join(dir, "tokens")
	if err := os.WriteFile(tokens, []byte("demo "+token+"\n"), 0o600); err != nil {
		return err
	}
	stop, err := d.startBroker(filepath.Join(dir, "ringbatch.toml"))
	if err != nil {
		return err
	}
	defer stop()
	ready, done := context.WithTimeout(ctx, time.Minute)
	defer done()
	if err := admin.New(d.socket).WaitReady(ready, "mlp", "affine"); ctx.Err() != nil { // Ctrl-C
		return nil
	} else if err != nil {
		return err
	}
	load := d.startLoad(ctx)
	defer func() { cancel(); load.Wait() }() // before the broker ends
	fmt.Printf("http://%s/dashboard\n", l.Addr())
	fmt.Printf("settings can be changed there with the token %s\n", token)
	fmt.Printf("in another terminal: ringbatch top --socket %s\nCtrl-C ends it\n", d.socket)
	return serveConsole(ctx, l, d.socket, tokens, nil)
}

// demo is a broker with a load.
type demo struct{ socket string }

const demoConfig = `
[[model]]
name = "mlp"
inputs = ["x:f32[1024]"]
outputs = ["y:f32[1024]"]
max_batch_size = 32
[[model.worker]]
command = [%[1]q, "worker", "mlp"]
instances = 2

[[model]]
name = "affine"
inputs = ["x:f32[64]"]
outputs = ["y:f32[64]"]
max_batch_size = 64
wait_time = "3ms"
[[model.worker]]
command = [%[1]q, "worker", "affine", "--scale", "2", "--input", "x:f32[64]"]
`

// startBroker starts this program as a broker. stop ends the broker and its workers.
func (d *demo) startBroker(config string) (stop func(), err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(config, fmt.Appendf(nil, demoConfig, self), 0o600); err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "broker", "--config", config, "--socket", d.socket, "--log-level", "warn")
	cmd.Stderr = os.Stderr
	// A separate process group: Ctrl-C reaches this process, which ends the broker.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}, nil
}

// startLoad sends requests to both models, with a load that rises and falls like a tide.
func (d *demo) startLoad(ctx context.Context) *sync.WaitGroup {
	var wg sync.WaitGroup
	for _, m := range []struct {
		name    string
		callers int
		period  float64       // of the tide, in seconds
		pause   time.Duration // between two requests of a caller, at high tide
	}{{"mlp", 24, 20, 30 * time.Millisecond}, {"affine", 48, 13, 10 * time.Millisecond}} {
		wg.Go(func() {
			c, err := client.Dial(ctx, m.name, client.WithSocket(d.socket), client.WithName("demo"), client.WithWindow(m.callers),
				client.WithRetry(time.Minute))
			if err != nil {
				return // Ctrl-C came first
			}
			defer c.Close()
			sig := c.Model().Signature
			x := make([]float32, sig.Inputs[0].RowElems())
			begin := time.Now()
			var callers sync.WaitGroup
			for range m.callers {
				callers.Go(func() {
					for ctx.Err() == nil {
						tide := 0.55 + 0.45*math.Sin(2*math.Pi*time.Since(begin).Seconds()/m.period)
						select {
						case <-ctx.Done():
							return
						case <-time.After(time.Duration(mathrand.ExpFloat64() * float64(m.pause) / tide)):
						}
						if _, err := c.Infer(ctx, x); err != nil && ctx.Err() == nil && !errors.Is(err, context.Canceled) {
							fmt.Fprintln(os.Stderr, "ringbatch demo:", err)
							time.Sleep(time.Second)
						}
					}
				})
			}
			callers.Wait()
		})
	}
	return &wg
}
