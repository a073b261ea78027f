// SPDX-License-Identifier: Apache-2.0

// Package top is `ringbatch top`: a table of the broker's models, drawn again and again in a terminal.
package top

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ringbatch/ringbatch/admin"
	"github.com/ringbatch/ringbatch/admin/stats"
)

// Config is the command line.
type Config struct {
	Socket   string
	Model    string        // show this model only; empty: all
	Interval time.Duration // between two questions to the broker
}

// ErrNoTerminal reports a standard input or output that is a pipe or a file.
var ErrNoTerminal = errors.New("top needs a terminal; elsewhere use `ringbatch stats --interval 1s` or `ringbatch stats --json`")

const patience = 5 * time.Second // with a broker that does not answer

// answer is the broker's, or the reason why there is none.
type answer struct {
	stats *stats.Broker
	err   error
}

// Run shows the table until the user presses q, ctx ends, or the terminal is closed.
func Run(ctx context.Context, cfg Config) error {
	before, err := unix.IoctlGetTermios(0, unix.TCGETS)
	if _, outErr := unix.IoctlGetTermios(1, unix.TCGETS); err != nil || outErr != nil {
		return ErrNoTerminal
	}
	if term := os.Getenv("TERM"); term == "" || term == "dumb" {
		return ErrNoTerminal
	}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGWINCH, syscall.SIGCONT, syscall.SIGTSTP)
	defer signal.Stop(signals)
	if err := enterScreen(before); err != nil {
		return err
	}
	defer leaveScreen(before)

	keys, answers := make(chan byte), make(chan answer, 1)
	go readKeys(ctx, keys)
	broker := admin.New(cfg.Socket)
	ask := func() {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		s, err := broker.Stats(ctx)
		answers <- answer{s, err}
	}
	v := &view{socket: broker.Socket(), only: cfg.Model}
	tick := time.NewTicker(cfg.Interval)
	defer tick.Stop()
	asking := true
	go ask()
	for {
		if err := redraw(v); err != nil {
			return nil // the terminal was closed
		}
		select {
		case <-ctx.Done():
			return nil
		case a := <-answers:
			asking = false
			v.take(a, time.Now())
		case <-tick.C:
			if !asking {
				asking = true
				go ask()
			}
		case s := <-signals:
			switch s {
			case syscall.SIGTSTP:
				leaveScreen(before)
				_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
			case syscall.SIGCONT:
				if err := enterScreen(before); err != nil {
					return nil
				}
			}
		case k, ok := <-keys:
			switch {
			case !ok || k == 'q':
				return nil
			case k == 's':
				v.sort = (v.sort + 1) % len(columns)
			}
		}
	}
}

// enterScreen switches to the alternate screen. Keys arrive at once and are not echoed; Ctrl-C and Ctrl-Z stay signals.
func enterScreen(before *unix.Termios) error {
	now := *before
	now.Lflag &^= unix.ECHO | unix.ICANON
	now.Cc[unix.VMIN], now.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(1, unix.TCSETSW, &now); err != nil {
		return err
	}
	_, err := os.Stdout.WriteString("\x1b[?1049h\x1b[?25l")
	return err
}

// leaveScreen restores the terminal and drops the keys that were not read.
func leaveScreen(before *unix.Termios) {
	_, _ = os.Stdout.WriteString("\x1b[?25h\x1b[?1049l")
	_ = unix.IoctlSetTermios(1, unix.TCSETSF, before)
}

// redraw writes the whole screen in one piece. Each line is erased before it is written, so that nothing flickers.
func redraw(v *view) error {
	width, height := 80, 24
	if s, err := unix.IoctlGetWinsize(1, unix.TIOCGWINSZ); err == nil && s.Col > 0 && s.Row > 0 {
		width, height = int(s.Col), int(s.Row)
	}
	lines := v.draw(width, height)
	_, err := os.Stdout.WriteString("\x1b[1;1H\x1b[K" + strings.Join(lines, "\r\n\x1b[K"))
	return err
}

// readKeys closes the channel when the terminal is closed.
func readKeys(ctx context.Context, keys chan<- byte) {
	defer close(keys)
	var b [1]byte
	for {
		if n, err := os.Stdin.Read(b[:]); err != nil || n == 0 {
			return
		}
		select {
		case keys <- b[0]:
		case <-ctx.Done():
			return
		}
	}
}
