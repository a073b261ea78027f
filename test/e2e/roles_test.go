// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/test/testbed"
	"github.com/ringbatch/ringbatch/worker"
)

// The first number of a row is a command to the worker.
const (
	cmdAnswer = 0
	cmdPoison = 0x0dead // the worker dies of it
	cmdHang   = 0x0a119 // the worker never comes back
	cmdSlow   = 0x00510 // the worker takes x[2] milliseconds
	cmdFail   = 0x0fa11 // the worker fails this request alone
)

func playWorker(c *testbed.Child, j job) error {
	w := obedient{say: func(what string) { _ = c.Tell(what, nil) }}
	if j.Do == "patiently" {
		w.patience = make(chan os.Signal, 1)
		signal.Notify(w.patience, syscall.SIGUSR1)
	}
	cfg := j.Model.WorkerConfig(j.Socket)
	cfg.Name, cfg.Concurrency = j.Name, j.AtOnce
	return worker.Serve(c.Context(), cfg, w.obey)
}

// obedient is a worker that answers, or obeys the command of a row.
type obedient struct {
	say      func(string)
	patience chan os.Signal // if not nil, a slow request waits for one
}

// obey is for workers in this process.
func obey(ctx context.Context, b *worker.Batch) error {
	return (&obedient{say: func(string) {}}).obey(ctx, b)
}

func (w *obedient) obey(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		x := worker.Row[int64](b.Input(0), i)
		w.command(b, i, x)
		y := worker.Row[int64](b.Output(0), i)
		for j := range x {
			y[j] = testbed.Answer(x[j], j)
		}
	}
	return nil
}

// command obeys the command of row i.
func (w *obedient) command(b *worker.Batch, i int, x []int64) {
	switch x[0] {
	case cmdPoison:
		w.say("poisoned")
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case cmdHang:
		w.say("hanging")
		select {}
	case cmdSlow:
		w.say("slow")
		if w.patience != nil {
			<-w.patience
		}
		time.Sleep(time.Duration(x[2]) * time.Millisecond)
	case cmdFail:
		for q := range b.Len() {
			if req := b.Request(q); req.Row <= i && i < req.Row+req.Rows {
				b.Fail(q, fmt.Errorf("command to fail %d", x[1]))
			}
		}
	}
}

// playClient stops at a step of a request, reports it, and waits to be killed.
func playClient(c *testbed.Child, j job) error {
	ctx := c.Context()
	dial, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	opts := []client.Option{client.WithSocket(j.Socket)}
	if j.Window > 0 {
		opts = append(opts, client.WithWindow(j.Window))
	}
	conn, err := client.Dial(dial, j.Model.Name, opts...)
	if err != nil {
		return err
	}
	if j.Do == "attach" {
		return stay(c, "attach")
	}
	x := []int64{cmdAnswer, 0, 100}
	if j.Do == "wait" {
		x[0] = cmdSlow
	}
	if j.Stage > 0 {
		x = append(x, int64(j.Stage))
	}
	return testbed.StepByStep(ctx, conn, 1, x, func(step string) {
		switch {
		case step == testbed.StepCommit && j.Do == "wait":
			_ = c.Tell("wait", nil)
		case step == testbed.StepRead && j.Do == "fork":
			pid, err := forkSleeper()
			if err != nil {
				panic(err)
			}
			_ = c.Tell("forked", pid)
			_ = stay(c, step)
		case step == j.Do, step == testbed.StepRead:
			_ = stay(c, step)
		}
	})
}

func stay(c *testbed.Child, stage string) error {
	_ = c.Tell(stage, nil)
	select {}
}

// forkSleeper starts a child that inherits this process's connections and outlives it.
func forkSleeper() (int, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, err
	}
	files := []uintptr{null.Fd(), null.Fd(), null.Fd()} // the test reads this process's own to their end
	for fd := range 64 {
		if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil {
			files = append(files, uintptr(fd))
		}
	}
	return syscall.ForkExec("/bin/sleep", []string{"sleep", "600"}, &syscall.ProcAttr{Files: files})
}
