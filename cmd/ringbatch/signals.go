// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ringbatch/ringbatch/broker"
)

// endings are the signals at which a command ends its processes and itself. A closed
// terminal sends SIGHUP, which nohup ignores. The broker reloads its configuration at
// SIGHUP.
func endings(args []string) []os.Signal {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if len(args) > 0 && args[0] != "broker" && !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// serveUntilInsisted drains at the first signal, which ends ctx. At a second signal it ends
// the worker processes, if necessary by force, and ends itself by that signal.
func serveUntilInsisted(ctx context.Context, b *broker.Broker, log *slog.Logger) error {
	insisted := make(chan struct{})
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		second := secondOf(ctx, signals)
		close(insisted)
		if !b.KillWorkers() {
			log.Warn("worker processes, or MPS, have not ended")
		}
		endBy(second)
	}()
	err := b.Serve(ctx)
	select {
	case <-insisted: // that goroutine ends the process
		select {}
	default:
		return err
	}
}

// onePress is how long further signals count as the first: another process of the group
// may pass on the signal that it got, too.
const onePress = 500 * time.Millisecond

// secondOf waits for the second signal; the first has ended ctx.
func secondOf(ctx context.Context, signals <-chan os.Signal) syscall.Signal {
	if ctx.Err() == nil { // else the first came before Notify
		<-signals
	}
	for first := time.Now(); ; {
		if s := <-signals; time.Since(first) >= onePress {
			return s.(syscall.Signal)
		}
	}
}

// endBy ends this process by a signal.
func endBy(s syscall.Signal) {
	signal.Reset(s)
	_ = syscall.Kill(os.Getpid(), s)
	time.Sleep(100 * time.Millisecond)
	os.Exit(128 + int(s)) // the signal is ignored, or this is process 1 of a container
}
