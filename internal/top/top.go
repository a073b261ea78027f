// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Config is what the command line says.
type Config struct {
	Socket   string
	Model    string        // chosen first; empty: the first one
	Interval time.Duration // between two snapshots
}

// Run shows the broker in the terminal of standard input and output until it is
// told to quit, ctx ends, or the terminal goes away.
func Run(ctx context.Context, cfg Config) error {
	t, err := openTerminal(os.Stdin, os.Stdout)
	if err != nil {
		return err
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGWINCH, syscall.SIGCONT)
	defer signal.Stop(signals)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := t.enter(); err != nil {
		return err
	}
	defer t.leave()

	keys := make(chan key)
	go readKeys(ctx, t.in, keys)
	f := newFeed(cfg.Socket)
	v := newView(f.admin.Socket(), cfg.Model)
	tick := time.NewTicker(cfg.Interval)
	defer tick.Stop()
	asking := true
	f.ask(ctx, v.chosen)
	for {
		if err := t.show(draw(v, t)); err != nil {
			return nil // the terminal has gone
		}
		wanted := v.chosen
		select {
		case <-ctx.Done():
			return nil
		case s := <-f.got:
			asking = false
			v.take(s)
			if v.chosen != s.model && s.err == nil && !v.paused { // chosen meanwhile
				asking = true
				f.ask(ctx, v.chosen)
			}
		case <-tick.C:
			if !asking && !v.paused {
				asking = true
				f.ask(ctx, v.chosen)
			}
		case sig := <-signals:
			if sig == syscall.SIGCONT {
				if err := t.enter(); err != nil { // the shell has had it
					return nil
				}
			}
			t.forget()
		case k, ok := <-keys:
			switch {
			case !ok || k == 'q' || k == ctrlC || k == ctrlBackslash:
				return nil
			case k == ctrlZ:
				t.leave()
				_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP) // SIGCONT has it entered again
			case k == ctrlL:
				t.forget()
			default:
				v.press(k)
				if v.chosen != wanted && !asking && !v.paused {
					asking = true
					f.ask(ctx, v.chosen) // its batches
				}
			}
		}
	}
}

func draw(v *view, t *terminal) []string {
	width, height := t.size()
	return v.draw(width, height)
}

// readKeys closes the channel when the terminal has gone.
func readKeys(ctx context.Context, in *os.File, keys chan<- key) {
	defer close(keys)
	var board keyboard
	var buffer [64]byte
	for {
		n, err := in.Read(buffer[:])
		if err != nil || n == 0 {
			return
		}
		for _, b := range buffer[:n] {
			if k := board.press(b); k != keyNone {
				select {
				case keys <- k:
				case <-ctx.Done():
					return
				}
			}
		}
	}
}
