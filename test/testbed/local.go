// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/ringbatch/ringbatch/broker"
	"github.com/ringbatch/ringbatch/client"
	"github.com/ringbatch/ringbatch/internal/testhooks"
	"github.com/ringbatch/ringbatch/shm"
	"github.com/ringbatch/ringbatch/status"
	"github.com/ringbatch/ringbatch/worker"
)

// Local is a broker in this process.
type Local struct {
	Config broker.Config // may be changed while the broker is stopped
	dir    string
	cancel context.CancelFunc // nil while the broker is stopped
	ended  chan error
}

// StartOnHeap is StartLocal for tests whose peers all live in this process, too: the
// race detector sees their shared memory.
func StartOnHeap(cfg broker.Config) (*Local, error) { return StartWith(cfg, shm.CreateOnHeap) }

// StartLocal serves until Close. By default the socket is in a new folder and the log
// is silent.
func StartLocal(cfg broker.Config) (*Local, error) { return StartWith(cfg, nil) }

// StartWith is StartLocal with a function that makes the broker's segments.
func StartWith(cfg broker.Config, create testhooks.Create) (*Local, error) {
	dir, err := os.MkdirTemp("", "rb") // the path of t.TempDir can be too long for a socket
	if err != nil {
		return nil, err
	}
	if cfg.Socket == "" {
		cfg.Socket = filepath.Join(dir, "b.sock")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if create != nil {
		testhooks.MakeSegments(cfg.Socket, create)
	}
	l := &Local{Config: cfg, dir: dir}
	if err := l.Start(); err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	return l, nil
}

// Socket is the broker's socket.
func (l *Local) Socket() string { return l.Config.Socket }

// Start serves after Stop, with the same configuration.
func (l *Local) Start() error {
	b, err := broker.New(l.Config)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel, l.ended = cancel, make(chan error, 1)
	go func() { l.ended <- b.Serve(ctx) }()
	return nil
}

// Stop ends the broker, as SIGTERM would.
func (l *Local) Stop() error {
	if l.cancel == nil {
		return nil
	}
	l.cancel()
	l.cancel = nil
	return <-l.ended
}

// Close stops it and removes its folder.
func (l *Local) Close() error {
	err := l.Stop()
	_ = os.RemoveAll(l.dir)
	return err
}

// WaitFor waits for a request for at most d: status.ErrTimeout if it goes on.
func WaitFor(r *client.Request, d time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	err := r.Wait(ctx)
	if ctx.Err() != nil && errors.Is(r.Poll(), status.ErrNotDone) {
		return status.ErrTimeout
	}
	return err
}

// Touch asks for the memory of all outputs, as a worker does that writes them.
func Touch(b *worker.Batch) {
	for k := range b.Signature().Outputs {
		for i := range b.Runs() {
			b.Output(k).Run(i)
		}
	}
}

// ServeLocal runs worker.Serve in the background. It returns when the worker is attached
// or has failed. leave ends the worker and returns its error.
func ServeLocal(cfg worker.Config, fn worker.Func) (leave func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	attached, ended := make(chan struct{}), make(chan struct{})
	come := sync.OnceFunc(func() { close(attached) })
	var err error
	go func() {
		defer close(ended)
		cfg.Attached = come
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
