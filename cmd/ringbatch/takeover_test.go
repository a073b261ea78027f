// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/must"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/test/testbed"
)

// The workers of the broker that takes over start on a signal of the test, so that the test
// sees which worker serves before and after.
func TestABrokerTakesOverOnceItsOwnWorkersHaveAttached(t *testing.T) {
	c := startCLI(t)
	c.reload(c.served(2, 1, 0))
	c.until("it is served", func() bool { return len(c.stats().Models[0].Workers) == 1 })
	l := c.load(4, client.WithRetry(time.Minute))
	old, pid := c.broker, c.stats().Pid
	answersGoOn := func(what string) {
		t.Helper()
		n := l.answers.Load()
		c.until(what, func() bool { return l.answers.Load() > n+100 || t.Failed() })
	}

	c.write(strings.Replace(c.served(3, 1, 0), `"--scale"`, `"--no-such-flag"`, 1))
	broken := c.takesOver()
	if err := broken.Wait(patience); err == nil || !strings.Contains(broken.Log(), "left alone") {
		t.Errorf("a broker whose worker does not start: %v\n%s", err, broken.Log())
	}
	answersGoOn("the old broker still answers")

	start := c.bed.Path("start")
	c.write(strings.Replace(c.served(3, 1, 0), fmt.Sprintf("command = [%q,", c.bin),
		fmt.Sprintf(`command = ["sh", "-c", "until [ -e %s ]; do sleep 0.01; done; exec %s $@", "sh",`, start, c.bin), 1))
	c.broker = c.takesOver()
	c.until("its worker starts", func() bool { return strings.Contains(c.broker.Log(), "worker process started") })
	answersGoOn("the old broker answers while the worker starts")
	if now := c.stats().Pid; now != pid || l.last.Load() != 2 {
		t.Errorf("broker %d has the socket, not %d; scale %d answers", now, pid, l.last.Load())
	}
	must.Do(t, os.WriteFile(start, nil, 0o600))
	c.until("the new broker has the socket", func() bool {
		s := c.stats()
		if s.Pid == pid {
			return false
		}
		own := func(w stats.Worker) bool {
			return slices.ContainsFunc(s.Processes, func(p stats.Process) bool { return p.Pid == w.Pid })
		}
		if len(s.Models) != 1 || !slices.ContainsFunc(s.Models[0].Workers, own) {
			t.Errorf("it has the socket, and no worker of its own: %+v", s.Models)
		}
		return true
	})
	c.until("the new worker answers", func() bool { return l.last.Load() == 3 || t.Failed() })
	c.hasEnded(old)
	c.must("restart", "affine")
	answersGoOn("the restarted worker answers")
	l.end()
	c.ends(c.broker)
	files, err := os.ReadDir(c.bed.Path("private"))
	must.Do(t, err)
	for _, f := range files {
		if strings.HasPrefix(f.Name(), "b.sock") {
			t.Errorf("%s was left behind", f.Name())
		}
	}
}

func (c *cli) takesOver() *testbed.Process {
	return c.start("broker", "--config", c.config, "--log-level", "info", "--take-over")
}

// hasEnded waits for the broker that was taken over, which ends well.
func (c *cli) hasEnded(old *testbed.Process) {
	c.t.Helper()
	if err := old.Wait(patience); err != nil {
		c.t.Fatalf("the old broker: %v\n%s", err, old.Log())
	}
}

// infer makes one request beside the test, and gives its end.
func (c *cli) infer(model string) <-chan error {
	c.t.Helper()
	caller, err := client.Dial(c.t.Context(), model, client.WaitForModel())
	must.Do(c.t, err)
	c.t.Cleanup(func() { caller.Close() })
	ended := make(chan error, 1)
	go func() {
		_, err := caller.Infer(c.t.Context(), []float32{1, 2, 3, 4})
		ended <- err
	}()
	return ended
}

// No client here retries: at each moment of a take-over a broker answers.
func TestEveryCallDuringATakeOverFindsABroker(t *testing.T) {
	c := startCLI(t)
	var stop atomic.Bool
	var come sync.WaitGroup
	a := admin.New("")
	for what, comes := range map[string]func() error{
		"dials":           func() error { return dialOnce(t.Context()) },
		"dials as well":   func() error { return dialOnce(t.Context()) },
		"asks for stats":  func() error { _, err := a.Stats(t.Context()); return err },
		"asks for models": func() error { _, err := a.Models(t.Context()); return err },
		"pings":           func() error { _, err := a.Ping(t.Context()); return err },
	} {
		come.Go(func() {
			for !stop.Load() {
				if err := comes(); err != nil {
					t.Errorf("who %s: %v", what, err)
					return
				}
			}
		})
	}
	defer come.Wait()
	defer stop.Store(true)
	for range 5 {
		old := c.broker
		c.broker = c.takesOver()
		c.hasEnded(old)
	}
}

func dialOnce(ctx context.Context) error {
	cl, err := client.Dial(ctx, "affine")
	if err != nil {
		return err
	}
	return cl.Close()
}

// A broker that was taken over ends accepted requests without a worker at once: new workers
// attach to the other broker.
func TestABrokerThatHandedOverEndsRequestsWithoutAWorker(t *testing.T) {
	c := startCLI(t)
	late := strings.Replace(c.served(2, 1, 0), fmt.Sprintf("command = [%q,", c.bin), `command = ["sleep", "1000",`, 1)
	c.ends(c.broker)
	c.write(strings.Replace(late, ` "worker", "affine", "--scale", "2", "--input", "x:f32[4]"`, "", 1))
	old := c.start("broker", "--config", c.config, "--drain-time", "1h")
	ended := c.infer("affine")
	c.until("the request waits", func() bool { return c.stats().Models[0].SlotsQueued == 1 })
	c.write(c.served(3, 1, 0))
	c.broker = c.takesOver()
	if err := <-ended; !errors.Is(err, status.ErrDraining) {
		t.Errorf("the request ended with %v", err)
	}
	c.hasEnded(old)
}

// Callers of one model do not wait for batches of another model.
func TestATakeOverDoesNotDelayClientsOfOtherModels(t *testing.T) {
	c := startCLI(t)
	c.ends(c.broker)
	both := func(scale int) string {
		one := c.served(scale, 1, 0)
		return one + strings.NewReplacer(`name = "affine"`, "name = \"slow\"\nlease = \"1h\"", `"worker", "affine"`,
			`"worker", "affine", "--name", "slow"`).Replace(one)
	}
	c.write(both(2))
	old := c.start("broker", "--config", c.config, "--drain-time", "1h")
	c.broker = old
	ready := func() bool { _, code := c.run("ready"); return code == 0 }
	c.until("both are served", ready)
	worker := 0
	for _, m := range c.stats().Models {
		if m.Name == "slow" {
			worker = m.Workers[0].Pid
		}
	}
	must.Do(t, testbed.Freeze(worker, patience))
	defer func() { _ = syscall.Kill(worker, syscall.SIGKILL) }()
	ended := c.infer("slow")
	l := c.load(4, client.WithRetry(10*time.Minute))
	c.until("the slow one runs", func() bool {
		return slices.ContainsFunc(c.stats().Models, func(m stats.Model) bool { return m.Name == "slow" && m.SlotsRunning == 1 })
	})
	c.write(both(3))
	c.broker = c.takesOver()
	c.until("the new broker answers", func() bool { return l.last.Load() == 3 || t.Failed() })
	l.end()
	must.Do(t, syscall.Kill(worker, syscall.SIGCONT))
	if err := <-ended; err != nil {
		t.Errorf("the request that the old broker had accepted: %v", err)
	}
	c.hasEnded(old)
}
