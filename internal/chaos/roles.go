package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

// The model: a row of numbers, the first a command, the second unlike any
// other request's. The answer depends on every one of them and on its place.
const (
	modelName = "chaos"
	width     = 16
	slots     = 512
	maxBatch  = 8

	cmdAnswer = 0
	cmdPoison = 0xdead // the worker dies of it
)

var signature = tensor.Signature{
	Inputs:  []tensor.Spec{{Name: "x", DType: tensor.I64, Shape: []int{width}}},
	Outputs: []tensor.Spec{{Name: "y", DType: tensor.I64, Shape: []int{width}}},
}

func answer(x int64, j int) int64 { return x*0x9e3779b9 + int64(j)*0x85ebca6b + x>>7 }

func play(text string) int {
	var ro role
	if err := json.Unmarshal([]byte(text), &ro); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	if ro.Files > 0 {
		lim := unix.Rlimit{Cur: uint64(ro.Files), Max: uint64(ro.Files)}
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGUSR1, syscall.SIGCHLD, syscall.SIGPROF) // heard, and nothing more
	go func() {                                                                               // whoever started us is gone
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	var err error
	switch ro.Kind {
	case "broker":
		err = ro.broker(ctx)
	case "worker":
		err = ro.worker(ctx)
	case "client":
		err = ro.client(ctx)
	case "load":
		err = ro.load(ctx)
	case "hostile":
		err = ro.hostile(ctx)
	case "ping":
		err = ro.ping(ctx)
	default:
		err = fmt.Errorf("no role %q", ro.Kind)
	}
	if err != nil {
		say("error: %v", err)
		return 1
	}
	return 0
}

func say(format string, a ...any) { fmt.Printf(format+"\n", a...) }

// die ends this process as if somebody had pulled its plug, and says when.
func die() {
	say("dying %d", time.Now().UnixNano())
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// dieSoon dies at some instruction of whatever comes next.
func dieSoon(d time.Duration) {
	go func() {
		runtime.LockOSThread()
		for end := shm.Now() + int64(d); shm.Now() < end; {
		}
		die()
	}()
}

func (ro *role) broker(ctx context.Context) error {
	log := io.Writer(os.Stderr)
	if ro.Log != "" {
		f, err := os.OpenFile(ro.Log, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		log = f
	}
	lease := time.Duration(ro.Lease) * time.Millisecond
	b, err := broker.New(broker.Config{
		Socket: ro.Socket, AllowedUIDs: ro.UIDs, OpenFolder: ro.Open, DrainTime: 5 * time.Second,
		Logger: slog.New(slog.NewJSONHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Models: []broker.ModelConfig{{Name: modelName, Signature: signature, Slots: slots, Lease: lease,
			Policy: batcher.Config{MaxBatchSize: maxBatch, WaitTime: 300 * time.Microsecond}}},
	})
	if err != nil {
		return err
	}
	say("listening")
	return b.Serve(ctx)
}

// worker serves some batches, then dies at its label.
func (ro *role) worker(ctx context.Context) error {
	rng := rand.New(rand.NewPCG(ro.Seed, 2))
	for {
		w, err := worker.Attach(ctx, worker.Config{Model: modelName, Signature: signature, Socket: ro.Socket, Depth: 2})
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			time.Sleep(5 * time.Millisecond)
			continue
		}
		say("attached")
		for {
			b, err := w.Next(ctx)
			if err != nil {
				break
			}
			label := ""
			if ro.Label != "" {
				if ro.After--; ro.After < 0 {
					label = ro.Label
				}
			}
			ro.compute(b, label, rng)
		}
		w.Close()
		if ctx.Err() != nil {
			return nil
		}
	}
}

func (ro *role) compute(b *worker.Batch, label string, rng *rand.Rand) {
	switch label {
	case "taken":
		die()
	case "random":
		dieSoon(time.Duration(rng.IntN(200_000)))
	}
	for i := range b.Rows() {
		x := worker.Row[int64](b.Input(0), i)
		if x[0] == cmdPoison {
			die()
		}
		y := worker.Row[int64](b.Output(0), i)
		for j := range x {
			y[j] = answer(x[j], j)
			if label == "half-written" && j == width/2 {
				die()
			}
		}
	}
	switch label {
	case "before word":
		die()
	case "word to done":
		dieSoon(time.Duration(rng.IntN(20_000)))
	}
	b.Complete()
	if label == "after done" {
		die()
	}
}

// client runs some requests, then dies at its label.
func (ro *role) client(ctx context.Context) error {
	rng := rand.New(rand.NewPCG(ro.Seed, 3))
	if ro.Label == "dial" {
		dieSoon(time.Duration(rng.IntN(400_000)))
	}
	c, err := client.Dial(ctx, modelName, client.WithSocket(ro.Socket), client.WithWindow(1+rng.IntN(8)), client.WaitForModel())
	if err != nil {
		return err
	}
	at := func(step string) {
		if ro.After < 0 && step == ro.Label {
			die()
		}
	}
	for id := int64(0); ; id++ {
		if ro.After--; ro.After < 0 && ro.Label == "random" {
			dieSoon(time.Duration(rng.IntN(1_500_000)))
		}
		req, err := c.Claim(ctx, 1+rng.IntN(min(c.Model().Window, 3)))
		if err != nil {
			return err
		}
		at("claim")
		view, err := req.Input("x")
		if err != nil {
			return err
		}
		x, err := tensor.As[int64](view)
		if err != nil {
			return err
		}
		for j := range x {
			x[j] = id + int64(j)
			if j%width == 0 {
				x[j] = cmdAnswer
			}
			if j == len(x)/2 {
				at("write")
			}
		}
		if err := req.Commit(ctx); err != nil {
			return err
		}
		at("commit")
		if ro.After < 0 && ro.Label == "wait" {
			dieSoon(time.Duration(rng.IntN(300_000)))
		}
		if err := req.Wait(ctx); err != nil {
			return err
		}
		at("read")
		if err := req.Release(); err != nil {
			return err
		}
		at("release")
	}
}

// ping asks whether this user may connect.
func (ro *role) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := client.Dial(ctx, modelName, client.WithSocket(ro.Socket))
	if err != nil {
		return err
	}
	say("attached")
	return c.Close()
}
