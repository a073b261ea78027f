// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/ringbatch/ringbatch/admin"
)

func runReady(ctx context.Context, args []string) error {
	f := flags("ready", " [MODEL…]", `Check that models (default: all) are ready: a worker is attached that waits for work, or whose batch
does not take unusually long. Exit status 0 if so, else 1 and the reason.`, `  ringbatch ready
  ringbatch ready resnet50 --wait 30s      # in a start script
  ringbatch ready --live                   # only: do the broker's loops answer
`)
	socket := socketFlag(f)
	wait := f.Duration("wait", 0, "how long to wait for them to become ready")
	live := f.Bool("live", false, "ask only whether the broker answers, all of its loops")
	quiet := f.BoolP("quiet", "q", false, "print nothing if they are")
	if err := parse(f, args, 0, -1); err != nil {
		return err
	}
	if *live && f.NArg() > 0 {
		return fmt.Errorf("%w: --live is about the broker, not about models", errUsage)
	}
	a := admin.New(*socket)
	const answer = 5 * time.Second // for a broker that is asked once
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(*wait, answer))
	defer cancel()
	if *live {
		b, err := a.Ping(ctx)
		if err == nil && !*quiet {
			fmt.Printf("live: broker pid %d\n", b.Pid)
		}
		return err
	}
	ready := a.Ready
	if *wait > 0 {
		ready = a.WaitReady
	}
	if err := ready(ctx, f.Args()...); err != nil {
		return err
	}
	if !*quiet {
		fmt.Println("ready")
	}
	return nil
}
