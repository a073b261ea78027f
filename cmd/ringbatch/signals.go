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

// endings are the signals with which a command ends what it started, and itself.
// A terminal that is closed sends SIGHUP, unless nohup has us ignore it; the
// broker reads its configuration again then.
func endings(args []string) []os.Signal {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if len(args) > 0 && args[0] != "broker" && !signal.Ignored(syscall.SIGHUP) {
		signals = append(signals, syscall.SIGHUP)
	}
	return signals
}

// serveUntilInsisted drains at the first signal, which ends ctx. At a second one it
// ends the worker processes, by force if need be, and itself by that signal.
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

// onePress is how long signals belong to the one before: of a group of processes
// that all get one, another may tell us as well.
const onePress = 500 * time.Millisecond

// secondOf is the signal by which somebody insists; the first has ended ctx.
func secondOf(ctx context.Context, signals <-chan os.Signal) syscall.Signal {
	if ctx.Err() == nil { // else it came before these were listened to
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
	os.Exit(128 + int(s)) // it was ignored from the start, or this is the first process of a container
}
