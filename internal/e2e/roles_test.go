package e2e

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/broker/batcher"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/tensor"
	"github.com/ringbatch/ringbatch/worker"
)

func (r *role) play() int {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if r.Group != "" {
		if err := os.WriteFile(r.Group+"/cgroup.procs", []byte("0"), 0o644); err != nil { // 0: whoever writes
			say("error: %v", err)
			return 2
		}
	}
	if r.AddressMiB > 0 {
		if err := limitAddressSpace(r.AddressMiB); err != nil {
			say("error: %v", err)
			return 2
		}
	}
	if n := uint64(r.Descriptors); n > 0 {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			say("error: %v", err)
			return 2
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var err error
	switch r.Kind {
	case "broker":
		err = r.playBroker(ctx)
	case "worker":
		err = r.playWorker(ctx)
	case "client":
		err = r.playClient(ctx)
	case "damage":
		err = r.playDamage()
	case "ballast":
		err = r.playBallast()
	case "clock":
		err = r.playClock(ctx)
	default:
		err = fmt.Errorf("no role %q", r.Kind)
	}
	if err != nil {
		say("error: %v", err)
		return 1
	}
	return 0
}

func (r *role) playBroker(ctx context.Context) error {
	cfg := broker.Config{Socket: r.Socket, OpenFolder: r.OpenFolder, AllowedUIDs: r.AllowedUIDs, DrainTime: time.Duration(r.DrainMS) * time.Millisecond, MaxClients: r.MaxClients}
	for _, m := range r.Models {
		cfg.Models = append(cfg.Models, m.config())
	}
	b, err := broker.New(cfg)
	if err != nil {
		return err
	}
	say("listening")
	if err := b.Serve(ctx); err != nil {
		return err
	}
	say("drained")
	return nil
}

// The model of these tests: a row is some numbers, the first a command to the
// worker, the second unlike any other request's; the answer is 3·x + 7 + j.
const width = 16

const (
	cmdAnswer = 0
	cmdPoison = 0x0dead // the worker dies of it
	cmdHang   = 0x0a119 // the worker never comes back
	cmdSlow   = 0x00510 // the worker takes x[2] milliseconds
	cmdFail   = 0x0fa11 // the worker fails this request alone
)

func (m modelSpec) signature() tensor.Signature {
	n := m.Width
	if n == 0 {
		n = width
	}
	return tensor.Signature{
		Inputs:  []tensor.Spec{{Name: "x", DType: tensor.I64, Shape: []int{n}}},
		Outputs: []tensor.Spec{{Name: "y", DType: tensor.I64, Shape: []int{n}}},
	}
}

func (m modelSpec) config() broker.ModelConfig {
	return broker.ModelConfig{
		Name: m.Name, Signature: m.signature(), Slots: m.Slots, Lease: time.Duration(m.LeaseMS) * time.Millisecond,
		Policy: batcher.Config{MaxBatchSize: m.MaxBatch, WaitTime: time.Duration(m.WaitMS) * time.Millisecond},
	}
}

func answer(x int64, j int) int64 { return 3*x + 7 + int64(j) }

func (r *role) playWorker(ctx context.Context) error {
	m := r.Model
	if r.Do == "patiently" {
		patiently = make(chan os.Signal, 1)
		signal.Notify(patiently, syscall.SIGUSR1)
	}
	return worker.Serve(ctx, worker.Config{
		Model: m.Name, Signature: m.signature(), Socket: r.Socket, Name: r.Name, Depth: r.Depth,
		Policy: worker.Policy{MaxBatchSize: m.MaxBatch, WaitTime: time.Duration(m.WaitMS) * time.Millisecond, Slots: m.Slots, Lease: time.Duration(m.LeaseMS) * time.Millisecond},
	}, obey)
}

// patiently, in a worker that should wait in the middle of a slow request, is
// told when to go on (SIGUSR1).
var patiently chan os.Signal

// obey is the workers' function: it answers, or does what a row commands.
func obey(_ context.Context, b *worker.Batch) error {
	for i := range b.Rows() {
		x := worker.Row[int64](b.Input(0), i)
		switch x[0] {
		case cmdPoison:
			say("poisoned")
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		case cmdHang:
			say("hanging")
			select {}
		case cmdSlow:
			say("slow")
			if patiently != nil {
				<-patiently
			}
			time.Sleep(time.Duration(x[2]) * time.Millisecond)
		case cmdFail:
			for q := range b.Len() {
				if req := b.Request(q); req.Row <= i && i < req.Row+req.Rows {
					b.Fail(q, fmt.Errorf("told to fail %d", x[1]))
				}
			}
		}
		y := worker.Row[int64](b.Output(0), i)
		for j := range x {
			y[j] = answer(x[j], j)
		}
	}
	return nil
}

// playClient goes as far as told, says so, and stays there until it is
// killed.
func (r *role) playClient(ctx context.Context) error {
	dial, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	opts := []client.Option{client.WithSocket(r.Socket)}
	if r.Window > 0 {
		opts = append(opts, client.WithWindow(r.Window))
	}
	c, err := client.Dial(dial, r.Model.Name, opts...)
	if err != nil {
		return err
	}
	if r.Do == "attach" {
		return stay("attach")
	}
	req, err := c.Claim(ctx, 1)
	if err != nil {
		return err
	}
	if r.Do == "claim" {
		return stay("claim")
	}
	view, err := req.Input("x")
	if err != nil {
		return err
	}
	x, err := tensor.As[int64](view)
	if err != nil {
		return err
	}
	clear(x)
	switch r.Do {
	case "write":
		for k := 0; ; k++ { // killed in the middle of it
			x[k%len(x)]++
			if k == len(x) {
				say("write")
			}
		}
	case "wait":
		x[0], x[2] = cmdSlow, 100
	}
	if err := req.Commit(ctx); err != nil {
		return err
	}
	if r.Do == "wait" {
		say("wait")
	}
	if err := req.Wait(ctx); err != nil {
		return err
	}
	if r.Do == "fork" {
		// A child that keeps the connection open, and outlives us.
		pid, err := forkSleeper()
		if err != nil {
			return err
		}
		say("forked %d", pid)
	}
	return stay("read")
}

func stay(stage string) error {
	say("%s", stage)
	select {}
}

// limitAddressSpace refuses this process more than mib beyond what it has.
func limitAddressSpace(mib int) error {
	var size, rest uint64
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return err
	}
	if _, err := fmt.Sscan(string(text), &size, &rest); err != nil {
		return err
	}
	limit := size*uint64(os.Getpagesize()) + uint64(mib)<<20
	return unix.Setrlimit(unix.RLIMIT_AS, &unix.Rlimit{Cur: limit, Max: limit})
}
