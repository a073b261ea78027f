// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/ringbatch/ringbatch/internal/backoff"
	"github.com/ringbatch/ringbatch/internal/inside"
	"github.com/ringbatch/ringbatch/status"
)

// KeepAttached attaches and calls serve on this goroutine, which takes batches with Next.
// It does so again whenever serve returns ErrBrokerGone, and after errors of attaching
// for which status.RetryAttach is true: for cfg.WaitForBroker if the broker never ran. It
// returns nil when ctx has ended or serve returned nil.
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
		for _, note := range w.session.Info.Notes {
			slog.Warn("the model has another policy than this worker", "model", cfg.Model, "note", note)
		}
		if cfg.Attached != nil {
			cfg.Attached()
		}
		attached := time.Now()
		err = serve(inside.With(ctx, inner{w}), w)
		w.Close()
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return nil
		}
		if !errors.Is(err, status.ErrBrokerGone) {
			return err
		}
		slog.Info("broker went away, attaching again", "model", cfg.Model)
		if time.Since(attached) > backoff.Last { // a broker that dies at once gets longer pauses
			k.pause = backoff.Backoff{}
		}
		if !k.pause.Wait(ctx) {
			return nil
		}
	}
}

// keeper attaches until it succeeds or another attempt makes no sense.
type keeper struct {
	cfg      Config
	known    bool            // a broker has answered
	patience time.Time       // until then a broker may answer for the first time
	pause    backoff.Backoff // before the next attempt
	logged   status.Code     // the last reason
}

// attach returns nil, nil when ctx ends first.
func (k *keeper) attach(ctx context.Context) (*Worker, error) {
	for {
		w, err := attachOnce(ctx, k.cfg)
		if err == nil {
			k.known, k.logged = true, status.OK
			return w, nil
		}
		if ctx.Err() != nil {
			return nil, nil
		}
		if !k.triesAgain(err) {
			return nil, err
		}
		if !k.pause.Wait(ctx) {
			return nil, nil
		}
	}
}

// triesAgain reports whether to try again after err.
func (k *keeper) triesAgain(err error) bool {
	if errors.Is(err, status.ErrBrokerGone) || errors.Is(err, status.ErrDraining) { // the broker is being restarted
		k.known = true
	}
	if !status.RetryAttach(err) || !k.known && time.Now().After(k.patience) {
		return false
	}
	if !errors.Is(err, k.logged) { // once per reason, not per attempt
		slog.Warn("cannot attach yet, trying again", "model", k.cfg.Model, "error", err)
		_ = errors.As(err, &k.logged)
	}
	return true
}
