// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// Attaching again backs off between these.
const (
	firstRetry = 10 * time.Millisecond
	lastRetry  = time.Second
)

// KeepAttached attaches and calls serve, on this goroutine, and does so again
// whenever serve returns ErrBrokerGone: the broker is being restarted. It is
// what Serve is built on, for workers that take their batches themselves.
//
// Which errors of attaching are retried, later each time, is status.Code's
// RetryAttach. A broker that was never there is waited for as long as
// cfg.WaitForBroker says, one that was there for as long as ctx lives.
// KeepAttached returns nil when ctx has ended or serve returned nil, or the
// error that ended it. It closes the worker after each call of serve.
func KeepAttached(ctx context.Context, cfg Config, serve func(context.Context, *Worker) error) error {
	k := keeper{cfg: cfg, patience: time.Now().Add(cfg.WaitForBroker)}
	for {
		w, err := k.attach(ctx)
		if err != nil {
			return err
		}
		if w == nil { // ctx has ended
			return nil
		}
		if cfg.Attached != nil {
			cfg.Attached()
		}
		attached := time.Now()
		err = serve(ctx, w)
		w.Close()
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return nil
		}
		if !errors.Is(err, status.ErrBrokerGone) {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		slog.Info("broker went away, attaching again", "model", cfg.Model)
		if time.Since(attached) > lastRetry { // else it keeps dying
			k.delay = 0
		}
		k.backOff()
	}
}

// keeper attaches until that succeeds or trying makes no sense.
type keeper struct {
	cfg      Config
	known    bool          // a broker was there
	patience time.Time     // how long to wait for one until then
	delay    time.Duration // before the next try
	said     error         // what was logged last
}

// attach returns nil, nil when ctx ends first.
func (k *keeper) attach(ctx context.Context) (*Worker, error) {
	for {
		if k.delay > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(k.delay):
			}
		}
		w, err := Attach(ctx, k.cfg)
		if err == nil {
			k.known, k.said = true, nil
			return w, nil
		}
		if ctx.Err() != nil {
			return nil, nil
		}
		k.backOff()
		if !k.again(err) {
			return nil, err
		}
	}
}

func (k *keeper) backOff() { k.delay = min(max(2*k.delay, firstRetry), lastRetry) }

// again tells whether to try again after err.
func (k *keeper) again(err error) bool {
	var code status.Code
	if !errors.As(err, &code) || !code.RetryAttach() {
		return false
	}
	if code == status.ErrBrokerGone || code == status.ErrDraining { // it is being restarted just now
		k.known = true
	}
	if !k.known && time.Now().Add(k.delay).After(k.patience) {
		return false
	}
	if !errors.Is(k.said, code) { // once for each reason, not for each try
		slog.Warn("cannot attach yet, trying again", "model", k.cfg.Model, "error", err)
		k.said = code
	}
	return true
}
