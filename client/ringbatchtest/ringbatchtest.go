// SPDX-License-Identifier: Apache-2.0

// Package ringbatchtest runs a broker and workers in a test's own process.
//
//	b := ringbatchtest.Start(t, broker.Config{})
//	b.Serve(t, worker.Config{Model: "double", Signature: sig}, double)
//	model := b.Dial(t, "double")
//
// They end with the test, and nothing is left of them.
package ringbatchtest

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/worker"
)

// Broker is a broker in this process.
type Broker struct {
	Config broker.Config // may be changed while the broker is stopped
	dir    string
	cancel context.CancelFunc // nil while the broker is stopped
	ended  chan error
}

// Start serves until the test ends. By default the socket is in a new folder and the log is silent.
func Start(t testing.TB, cfg broker.Config) *Broker {
	t.Helper()
	b, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("broker: %v", err)
		}
	})
	return b
}

// Open is Start without a test, for an Example or TestMain. It serves until Close.
func Open(cfg broker.Config) (*Broker, error) {
	dir, err := os.MkdirTemp("", "rb") // private; the path of t.TempDir can be too long for a socket
	if err != nil {
		return nil, err
	}
	if cfg.Socket == "" {
		cfg.Socket = filepath.Join(dir, "b.sock")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	b := &Broker{Config: cfg, dir: dir}
	if err := b.Start(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	return b, nil
}

// Socket is the broker's socket.
func (b *Broker) Socket() string { return b.Config.Socket }

// Start serves after Stop, with b.Config.
func (b *Broker) Start() error {
	own, err := broker.New(b.Config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	b.cancel, b.ended = cancel, make(chan error, 1)
	go func() { b.ended <- own.Serve(ctx) }()
	return nil
}

// Stop ends the broker, as SIGTERM would.
func (b *Broker) Stop() error {
	if b.cancel == nil {
		return nil
	}
	b.cancel()
	b.cancel = nil
	return <-b.ended
}

// Close stops it and removes its folder.
func (b *Broker) Close() error {
	err := b.Stop()
	_ = os.RemoveAll(b.dir)
	return err
}

// Serve runs worker.Serve at this broker until the test ends, or leave is called. It returns when the worker is attached.
// The test fails if the worker does.
func (b *Broker) Serve(t testing.TB, cfg worker.Config, fn worker.Func) (leave func()) {
	t.Helper()
	cfg.Socket = b.Socket()
	end := Serve(cfg, fn)
	leave = sync.OnceFunc(func() {
		if err := end(); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("worker of %s: %v", cfg.Model, err)
		}
	})
	t.Cleanup(leave)
	return leave
}

// Serve runs worker.Serve in the background. It returns when the worker is attached or has failed. leave ends the worker
// and returns its error.
func Serve(cfg worker.Config, fn worker.Func) (leave func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	attached, ended := make(chan struct{}), make(chan struct{})
	before := cfg.Attached
	come := sync.OnceFunc(func() { close(attached) })
	cfg.Attached = func() {
		if before != nil {
			before()
		}
		come()
	}
	var err error
	go func() {
		defer close(ended)
		err = worker.Serve(ctx, cfg, fn)
	}()
	select {
	case <-attached:
	case <-ended:
	}
	return func() error {
		cancel()
		<-ended
		return err
	}
}

// Dial connects to a model of this broker until the test ends.
func (b *Broker) Dial(t testing.TB, model string, opts ...client.Option) *client.Client {
	t.Helper()
	c, err := client.Dial(t.Context(), model, append([]client.Option{client.WithSocket(b.Socket())}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}
