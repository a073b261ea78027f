// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/status"
)

// Pauses between two attempts to attach: doubled each time.
const (
	firstRetry = 10 * time.Millisecond
	lastRetry  = time.Second
)

// KeepAttached attaches, calls serve on this goroutine, and closes the worker. It does
// so again whenever serve returns ErrBrokerGone: the broker is being restarted. Serve
// uses it; it is for workers that take their batches themselves.
//
// KeepAttached tries again after an error of attaching for which Code.RetryAttach is
// true. For a broker that never ran it tries for cfg.WaitForBroker, for a broker that
// went away until ctx ends. It returns nil when ctx has ended or serve returned nil,
// otherwise the error that ended it.
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
		if time.Since(attached) > lastRetry { // a broker that dies at once gets longer pauses
			k.delay = 0
		}
		k.backOff()
	}
}

// keeper attaches until it succeeds or another attempt makes no sense.
type keeper struct {
	cfg      Config
	known    bool          // a broker has answered
	patience time.Time     // until then a broker may answer for the first time
	delay    time.Duration // before the next attempt
	logged   error         // the last reason
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
		w, err := attachOnce(ctx, k.cfg)
		if err == nil {
			k.known, k.logged = true, nil
			return w, nil
		}
		if ctx.Err() != nil {
			return nil, nil
		}
		k.backOff()
		if !k.triesAgain(err) {
			return nil, err
		}
	}
}

func (k *keeper) backOff() { k.delay = min(max(2*k.delay, firstRetry), lastRetry) }

// triesAgain reports whether to try again after err.
func (k *keeper) triesAgain(err error) bool {
	var code status.Code
	if !errors.As(err, &code) || !code.RetryAttach() {
		return false
	}
	if code == status.ErrBrokerGone || code == status.ErrDraining { // the broker is being restarted
		k.known = true
	}
	if !k.known && time.Now().Add(k.delay).After(k.patience) {
		return false
	}
	if !errors.Is(k.logged, code) { // once per reason, not per attempt
		slog.Warn("cannot attach yet, trying again", "model", k.cfg.Model, "error", err)
		k.logged = code
	}
	return true
}
